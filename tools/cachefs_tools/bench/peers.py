"""Blocks from node to node (M6), beside iperf3 and a plain copy over TLS between the same hosts, in one run."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
from cachefs_daemon.peers.peer import MOST_CONNECTIONS

from cachefs.errors import CachefsError
from cachefs_tools.lab.bridge import Bridge, bridge_network
from cachefs_tools.lab.host import LOOPBACK, Host, run
from cachefs_tools.scratch_node import WITH_PARENT, memory_directory, wait

SMALL: Final = 110_000
LARGE: Final = 4 << 20
# Seconds before figures count: the window learns meanwhile.
_WARM: Final = 2.0
_SIDE: Final = "cachefs_tools.bench.peer_side"
_SECONDS: Final = 120.0
_DROPPED: Final = re.compile(r"dropped (\d+)")


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What is measured."""

    seconds: float
    turns: int
    # Blocks that are asked for one at a time.
    singles: int
    # Bytes of blocks that are asked for at once.
    outstanding: int = 16 << 20
    loopback: bool = False
    # Megabits a second of the link of three to one, and bytes that its switch holds; 0: it is left out.
    megabits: int = 1000
    queue: int = 256 << 10


def measure(load: PeerLoad) -> dict[str, Any]:
    """The document. Raises CachefsError."""
    with ExitStack() as stack:
        if load.loopback:
            hosts: Sequence[Host] = (LOOPBACK, LOOPBACK)
            network = None
        else:
            network = stack.enter_context(bridge_network(4))
            hosts = network.hosts
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-bench-")))
        certificates = _certificates(work)
        document: dict[str, Any] = {"between": "loopback" if load.loopback else "namespaces", "pairs": {}}
        if shutil.which("iperf3") is None:
            document["missing"] = "iperf3 (Debian package iperf3): there is nothing to compare plain connections with"
            click.echo(f"cachefs-bench: {document['missing']}", err=True)
        for name, size in (("110 KB", SMALL), ("4 MiB", LARGE)):
            document["pairs"][name] = _pair(load, hosts, size, None)
        if certificates is not None:
            document["pairs"]["110 KB, TLS"] = _pair(load, hosts, SMALL, certificates)
            document["pairs"]["4 MiB, TLS"] = _pair(load, hosts, LARGE, certificates)
        if network is not None and load.megabits:
            document["three_to_one"] = _incast(load, network)
    return document


def _pair(load: PeerLoad, hosts: Sequence[Host], size: int, tls: Sequence[str] | None) -> dict[str, Any]:
    """One asks, one gives; and what is compared with that."""
    giver, asker = hosts[1], hosts[0]
    turns: list[dict[str, Any]] = []
    for turn in range(load.turns):
        click.echo(f"  blocks of {size:,} bytes{', TLS' if tls else ''}, turn {turn + 1}", err=True)
        given = _given(load, size, giver, asker, tls)
        with memory_directory("cachefs-bench-") as root, _side(giver, "give", {**given, "root": str(root)}) as said:
            found = _ask(asker, "ask", {**given, "givers": [[1, giver.address, said["port"]]]})
        if tls is not None:
            with (
                memory_directory("cachefs-bench-") as root,
                _side(giver, "copy-give", {**given, "root": str(root)}) as said,
            ):
                copied = _ask(asker, "copy-ask", {**given, "givers": [[1, giver.address, said["port"]]]})
            found["beside"] = copied["bytes_per_s"]
        elif shutil.which("iperf3") is not None:
            found["beside"] = _iperf(giver, asker, load.seconds)
        turns.append(found)
    return _summary(turns, "a plain TLS copy" if tls else "iperf3")


def _incast(load: PeerLoad, network: Bridge) -> dict[str, Any]:
    """Three give to one over a slow link."""
    click.echo(f"  three to one over {load.megabits} Mbit/s", err=True)
    asker, givers = network.hosts[0], network.hosts[1:4]
    network.limit(0, load.megabits, load.queue)
    network.offload(on=False)
    try:
        with ExitStack() as stack:
            given = _given(load, SMALL, givers[0], asker, None)
            places = []
            for number, giver in enumerate(givers, 1):
                root = stack.enter_context(memory_directory("cachefs-bench-"))
                role = {**given, "root": str(root), "number": number, "host": giver.address}
                said = stack.enter_context(_side(giver, "give", role))
                places.append([number, giver.address, said["port"]])
            before = _drops(network)
            found = _ask(asker, "ask", {**given, "givers": places, "singles": 0})
            dropped = _drops(network) - before
    finally:
        network.offload(on=True)
        network.unlimit(0)
    rate = found["bytes_per_s"] * 8 / 1e6
    return {
        "megabits_per_s": round(rate),
        "of_link": round(rate / load.megabits, 3),
        "dropped_packets": dropped,
        "window": found["window"],
    }


def _given(load: PeerLoad, size: int, giver: Host, asker: Host, tls: Sequence[str] | None) -> dict[str, Any]:
    return {
        "size": size,
        "number": 1,
        "host": giver.address,
        "asker": asker.address,
        "tls": tls,
        "warm": _WARM,
        "seconds": load.seconds,
        "outstanding": max(3, load.outstanding // size),
        "singles": load.singles if size == SMALL else 0,
        "connections": MOST_CONNECTIONS[0],
    }


@contextmanager
def _side(host: Host, role: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A side that runs as long as the block, and what it has said."""
    command = [*WITH_PARENT, *host.enter, sys.executable, "-m", _SIDE, role, json.dumps(given)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise CachefsError(f"the side that gives blocks has ended with status {process.wait()}")
        yield json.loads(line)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        wait(process)


def _ask(host: Host, role: str, given: dict[str, Any]) -> dict[str, Any]:
    command = [*host.enter, sys.executable, "-m", _SIDE, role, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode or not done.stdout:
        raise CachefsError(f"the side that asks for blocks failed: {done.stderr.strip()[-500:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _iperf(giver: Host, asker: Host, seconds: float) -> float:
    """Bytes a second of one connection."""
    port = str(asker.free_ports(1)[0])
    server = subprocess.Popen(
        [*WITH_PARENT, *asker.enter, "iperf3", "-s", "-1", "--forceflush", "-p", port, "-B", asker.address],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                raise CachefsError("iperf3 does not start")
        text = run([*giver.enter, "iperf3", "-c", asker.address, "-p", port, "-t", f"{seconds:g}", "-J"])
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()


def _drops(network: Bridge) -> int:
    """Packets towards the asker that its queue had no room for."""
    return sum(map(int, _DROPPED.findall(network.hub.run("tc", "-s", "qdisc", "show", "dev", "port1"))))


def _certificates(work: Path) -> list[str] | None:
    """Files of an authority, and one certificate for both sides: it names both."""
    if shutil.which("openssl") is None:
        click.echo("cachefs-bench: openssl is missing (Debian package openssl): TLS is not measured", err=True)
        return None
    new = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")
    cert, key = str(work / "cert.pem"), str(work / "key.pem")
    names = ",".join(f"DNS:node-{number}" for number in range(4))
    run([*new, "-subj", "/CN=bench", "-addext", f"subjectAltName={names}", "-keyout", key, "-out", cert])
    return [cert, cert, key]


def _summary(turns: Sequence[dict[str, Any]], beside: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "MB_per_s": round(median(turn["bytes_per_s"] for turn in turns) / 1e6),
        "receiver_s_per_GB": round(median(turn["cpu_s_per_gb"] for turn in turns), 2),
        "window": round(median(turn["window"] for turn in turns)),
    }
    if all("beside" in turn for turn in turns):
        found[f"{beside}_MB_per_s"] = round(median(turn["beside"] for turn in turns) / 1e6)
        found[f"of_{beside}"] = round(median(turn["bytes_per_s"] / turn["beside"] for turn in turns), 2)
    for key in ("p50_us", "p99_us"):
        if all(key in turn for turn in turns):
            found[key] = round(median(turn[key] for turn in turns))
    return found
