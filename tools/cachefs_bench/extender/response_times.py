"""`cachefs-bench extender`: measures response times with TLS clients of one connection each, as kube-scheduler has."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Final

import click
import psutil

from cachefs.errors import CachefsError, ConfigError
from cachefs_bench.extender.sample_requests import names_request, whole_nodes_request

_SECONDS: Final = 120.0
_CLIENTS: Final = 64


@dataclass(frozen=True, slots=True)
class ExtenderLoad:
    """The extent of the measurement."""

    nodes: int
    # Requests of each kind; a tenth as many with whole nodes.
    questions: int


@dataclass(frozen=True, slots=True)
class _ExtenderProcess:
    port: int
    context: ssl.SSLContext
    process: psutil.Process

    def processor_seconds(self) -> float:
        """Return the processor seconds used so far."""
        used = self.process.cpu_times()
        return float(used.user + used.system)

    def connect(self) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=_SECONDS, context=self.context)
        connection.connect()
        return connection


def measure(work: Path, load: ExtenderLoad) -> dict[str, object]:
    """Measure the milliseconds from the first byte of a request to the end of its answer. work: a directory to use."""
    with _run_extender(work, load.nodes) as service:
        # Warm up, like a kube-scheduler that has run for a while.
        _send_requests(service, "prioritize", [names_request(0, load.nodes)] * 5)
        names = _bodies(lambda number: names_request(number, load.nodes), load.questions)
        few = max(5, load.questions // 10)
        small = whole_nodes_request(1, load.nodes, 4)
        large = whole_nodes_request(1, load.nodes, 45)
        found: dict[str, object] = {"nodes": load.nodes, "load_before": round(psutil.getloadavg()[0], 1)}
        found["names"] = {
            "bytes": len(names[0]),
            "filter": _measure_verb(service, "filter", names),
            "filter_require": _measure_verb(
                service, "filter", [names_request(number, load.nodes, 1, "require") for number in range(few)]
            ),
            "prioritize": _measure_verb(service, "prioritize", names),
            "prioritize_gang_of_64": _measure_verb(
                service, "prioritize", _bodies(lambda number: names_request(number, load.nodes, 64), load.questions)
            ),
        }
        found["whole_nodes"] = {
            f"{len(body) / load.nodes / 1000:.1f} KB each": {
                "bytes": len(body),
                "filter": _measure_verb(service, "filter", [body] * few),
                "prioritize": _measure_verb(service, "prioritize", [body] * few),
            }
            for body in (small, large)
        }
        found["names_while_another_asks_with_whole_nodes"] = _measure_beside_large(service, names, large)
        found[f"names_{_CLIENTS}_clients_at_once"] = _measure_concurrent(service, names)
    return found


def _bodies(make: Callable[[int], bytes], count: int) -> list[bytes]:
    """Return the bodies of *count* pods; a hundred different ones, since more would take a gigabyte."""
    different = [make(number) for number in range(min(count, 100))]
    return [different[number % len(different)] for number in range(count)]


def _measure_verb(service: _ExtenderProcess, verb: str, bodies: Sequence[bytes]) -> dict[str, float]:
    """Return response times, and the service's processor time per answer, which depends less on other programs."""
    before = service.processor_seconds()
    found = _quantiles(_send_requests(service, verb, bodies))
    used = service.processor_seconds() - before
    return found | {"processor_ms": round(1000 * used / len(bodies), 2)}


def _send_requests(service: _ExtenderProcess, verb: str, bodies: Sequence[bytes]) -> list[float]:
    """Return the seconds of each request, sent one after the other."""
    connection = service.connect()
    try:
        return [_send_request(connection, verb, body) for body in bodies]
    finally:
        connection.close()


def _send_request(connection: http.client.HTTPSConnection, verb: str, body: bytes) -> float:
    begun = time.perf_counter()
    connection.request("POST", f"/{verb}", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.read()
    seconds = time.perf_counter() - begun
    if response.status != 200:
        raise CachefsError(f"the extender answers {response.status}: {found[:200].decode(errors='replace')}")
    return seconds


def _measure_beside_large(service: _ExtenderProcess, names: Sequence[bytes], large: bytes) -> dict[str, object]:
    """Measure while a second client sends requests with whole nodes without a pause."""
    ended = threading.Event()
    requests = count()

    def send_requests() -> None:
        while not ended.is_set():
            _send_requests(service, "filter", [large])
            next(requests)

    other = threading.Thread(target=send_requests)
    other.start()
    try:
        found = _quantiles(_send_requests(service, "prioritize", names))
    finally:
        ended.set()
        other.join(_SECONDS)
    return {"prioritize": found, "bytes_of_the_other": len(large), "questions_of_the_other": next(requests)}


def _measure_concurrent(service: _ExtenderProcess, names: Sequence[bytes]) -> dict[str, object]:
    share = max(1, len(names) // _CLIENTS)
    begun = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        found = list(pool.map(lambda _: _send_requests(service, "prioritize", names[:share]), range(_CLIENTS)))
    seconds = time.perf_counter() - begun
    return {
        "answers_per_second": round(_CLIENTS * share / seconds),
        "prioritize": _quantiles(list(chain.from_iterable(found))),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    found = sorted(seconds)

    def at(part: float) -> float:
        return round(1000 * found[min(len(found) - 1, int(part * len(found)))], 2)

    return {"p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0), "count": len(found)}


@contextmanager
def _run_extender(work: Path, nodes: int) -> Iterator[_ExtenderProcess]:
    certificate, key = _certificate(work)
    command = [sys.executable, "-m", "cachefs_bench.extender.service", str(nodes), str(certificate), str(key)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip():
            raise CachefsError("the extender has not started; see above")
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        yield _ExtenderProcess(int(line), context, psutil.Process(process.pid))
    finally:
        process.kill()
        process.communicate()


def _certificate(work: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        raise ConfigError("openssl is missing, which makes the certificate (Debian package openssl)")
    certificate, key = work / "tls.crt", work / "tls.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
            "-subj", "/CN=extender", "-keyout", str(key), "-out", str(certificate),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return certificate, key


def as_json(found: dict[str, object]) -> str:
    return json.dumps(found, indent=2)


@click.command("extender")
@click.option("--nodes", default=5000, show_default=True, type=click.IntRange(1, 16384), help="Of the cluster.")
@click.option(
    "--questions", default=400, show_default=True, type=click.IntRange(min=20),
    help="Of each kind; of those with whole nodes a tenth.",
)  # fmt: skip
def extender_command(nodes: int, questions: int) -> None:
    """Measure how long kube-scheduler waits for the extender, over HTTPS on loopback.

    The service has its own scoring, and nodes that are made up. Questions have the names of all nodes
    (nodeCacheCapable: true) or whole nodes (false), small ones and large ones.
    """
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-") as work:
        click.echo(as_json(measure(Path(work), ExtenderLoad(nodes, questions))))
