"""Measures block transfers between nodes (M6), next to iperf3 and a plain copy over TLS between the same hosts."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import click
from cachefs_daemon.peers.peer import MOST_CONNECTIONS

from cachefs.errors import CachefsError
from cachefs_tools.lab.bridge import Bridge, bridge_network
from cachefs_tools.lab.host import LOOPBACK, Host, run
from cachefs_tools.scratch_node import WITH_PARENT, Child, memory_directory, wait

SMALL: Final = 110_000
LARGE: Final = 4 << 20
# Measurements between two hosts: bytes of a block, and whether the connection is encrypted; PARTS: all measurements.
_PAIRS: Final[Mapping[str, tuple[int, bool]]] = {
    "110 KB": (SMALL, False),
    "4 MiB": (LARGE, False),
    "110 KB, TLS": (SMALL, True),
    "4 MiB, TLS": (LARGE, True),
}
THREE: Final = "three to one"
PARTS: Final = (*_PAIRS, THREE)
# Seconds before the first turn, in which the window adapts.
_WARM: Final = 2.0
_SIDE: Final = "cachefs_tools.bench.peer_side"
_SECONDS: Final = 120.0
_DROPPED: Final = re.compile(r"dropped (\d+)")

Turn = dict[str, float]


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """The extent of the measurement."""

    seconds: float
    turns: int
    # Blocks requested one at a time, in all turns.
    singles: int
    # Bytes of blocks in flight.
    outstanding: int = 16 << 20
    # Bytes of the window; 0: it adapts.
    window: int = 0
    loopback: bool = False
    # Megabits per second of the link of three to one, and bytes of its switch's queue; 0: left out.
    megabits: int = 1000
    queue: int = 256 << 10


def measure(load: PeerLoad, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Return the document. Raises CachefsError."""
    with ExitStack() as stack:
        if load.loopback:
            hosts: Sequence[Host] = (LOOPBACK, LOOPBACK)
            network = None
        else:
            network = stack.enter_context(bridge_network(4))
            hosts = network.hosts
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-bench-")))
        certificates = _certificates(work) if any(part.endswith("TLS") for part in parts) else None
        document: dict[str, Any] = {"between": "loopback" if load.loopback else "namespaces", "pairs": {}}
        if shutil.which("iperf3") is None:
            document["missing"] = "iperf3 (Debian package iperf3): there is nothing to compare plain connections with"
            click.echo(f"cachefs-bench: {document['missing']}", err=True)
        for part, (_, is_tls) in _PAIRS.items():
            if part in parts and (certificates is not None or not is_tls):
                document["pairs"][part] = _pair(load, hosts, part, certificates if is_tls else None)
        if network is not None and load.megabits and THREE in parts:
            document["three_to_one"] = _incast(load, network)
    return document


def _pair(load: PeerLoad, hosts: Sequence[Host], part: str, tls: Sequence[str] | None) -> dict[str, Any]:
    """Measure one pair of hosts and its comparison, in turns: a machine is slow for seconds at a time."""
    giver, asker, size = hosts[1], hosts[0], _PAIRS[part][0]
    turns: list[Turn] = []
    times: list[float] = []
    given = _given(load, size, giver, asker, tls)
    with ExitStack() as stack:
        ours = _asking(stack, given, giver, asker, "")
        beside: Callable[[], Turn] | None = None
        if tls is not None:
            copy = _asking(stack, given, giver, asker, "copy-")
            beside = partial(copy.ask, "many", load.seconds)
        elif shutil.which("iperf3") is not None:
            beside = partial(_iperf, giver, asker, load.seconds)
        ours.ask("many", _WARM)
        for number in range(load.turns):
            click.echo(f"  {part}, turn {number + 1} of {load.turns}", err=True)
            # The order alternates.
            before = beside() if beside is not None and number % 2 else None
            turn = ours.ask("many", load.seconds)
            other = before or (beside() if beside is not None else None)
            if other is not None:
                turn["beside_bytes_per_s"], turn["beside_cpu_s_per_gb"] = other["bytes_per_s"], other["cpu_s_per_gb"]
                turn["ratio"] = turn["bytes_per_s"] / other["bytes_per_s"]
            turns.append(turn)
            if size == SMALL:
                times += ours.ask("one by one", max(1, load.singles // load.turns))["seconds"]
    return _summary(turns, times, "a plain TLS copy" if tls else "iperf3")


def _incast(load: PeerLoad, network: Bridge) -> dict[str, Any]:
    """Measure three nodes that serve one over a slow link, in turns with one connection of iperf3."""
    asker, givers = network.hosts[0], network.hosts[1:4]
    network.limit(0, load.megabits, load.queue)
    network.offload(on=False)
    turns: list[Turn] = []
    try:
        with ExitStack() as stack:
            given = _given(load, SMALL, givers[0], asker, None)
            places = []
            for number, giver in enumerate(givers, 1):
                root = stack.enter_context(memory_directory("cachefs-bench-"))
                role = {**given, "root": str(root), "number": number, "host": giver.address}
                said = stack.enter_context(_side(giver, "give", role)).said()
                places.append([number, giver.address, said["port"]])
            side = stack.enter_context(_side(asker, "ask", {**given, "givers": places}))
            side.ask("many", _WARM)
            for number in range(load.turns):
                click.echo(f"  three to one over {load.megabits} Mbit/s, turn {number + 1} of {load.turns}", err=True)
                before = _drops(network)
                turn = side.ask("many", load.seconds)
                turn["dropped_packets"] = _drops(network) - before
                turn["of_link"] = _of_link(turn, load)
                if shutil.which("iperf3") is not None:
                    turn["iperf3_of_link"] = _of_link(_iperf(givers[0], asker, load.seconds), load)
                    turn["ratio"] = turn["of_link"] / turn["iperf3_of_link"]
                turns.append(turn)
    finally:
        network.offload(on=True)
        network.unlimit(0)
    found = {
        "of_link": round(median(turn["of_link"] for turn in turns), 3),
        "dropped_packets": sum(turn["dropped_packets"] for turn in turns),
        "window": round(median(turn["window"] for turn in turns)),
    }
    if all("iperf3_of_link" in turn for turn in turns):
        found["iperf3_of_link"] = round(median(turn["iperf3_of_link"] for turn in turns), 3)
        found["of_iperf3"] = round(median(turn["ratio"] for turn in turns), 2)
    return {**found, "turns": _rounded(turns)}


def _of_link(turn: Turn, load: PeerLoad) -> float:
    return turn["bytes_per_s"] * 8 / 1e6 / load.megabits


def _given(load: PeerLoad, size: int, giver: Host, asker: Host, tls: Sequence[str] | None) -> dict[str, Any]:
    return {
        "size": size,
        "number": 1,
        "host": giver.address,
        "asker": asker.address,
        "tls": tls,
        "outstanding": max(3, load.outstanding // size),
        "window": load.window,
        "connections": MOST_CONNECTIONS[0],
    }


class _Side:
    def __init__(self, process: Child) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout

    def said(self) -> dict[str, Any]:
        """Return the side's next line. Raises CachefsError if the side has ended."""
        line = self._from.readline()
        if not line:
            raise CachefsError(f"a side of the benchmark has ended with status {self._process.wait()}")
        document: dict[str, Any] = json.loads(line)
        return document

    def ask(self, what: str, amount: float) -> dict[str, Any]:
        """Send a request, and return the answer."""
        with suppress(BrokenPipeError):  # the side has ended, which `said` reports
            self._to.write(json.dumps([what, amount]).encode() + b"\n")
            self._to.flush()
        return self.said()


def _asking(stack: ExitStack, given: dict[str, Any], giver: Host, asker: Host, kind: str) -> _Side:
    """Start both sides, and return the requesting one."""
    root = stack.enter_context(memory_directory("cachefs-bench-"))
    said = stack.enter_context(_side(giver, f"{kind}give", {**given, "root": str(root)})).said()
    places = [[given["number"], giver.address, said["port"]]]
    return stack.enter_context(_side(asker, f"{kind}ask", {**given, "givers": places}))


@contextmanager
def _side(host: Host, role: str, given: dict[str, Any]) -> Iterator[_Side]:
    command = [*WITH_PARENT, *host.enter, sys.executable, "-m", _SIDE, role, json.dumps(given)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield _Side(process)
    finally:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        wait(process)


def _iperf(giver: Host, asker: Host, seconds: float) -> Turn:
    whole = max(1, round(seconds))  # iperf3 takes whole seconds
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
        text = run([*giver.enter, "iperf3", "-c", asker.address, "-p", port, "-t", str(whole), "-J"])
        end = json.loads(text)["end"]
        rate = float(end["sum_received"]["bits_per_second"]) / 8
        busy = float(end["cpu_utilization_percent"]["remote_total"]) / 100
        return {"bytes_per_s": rate, "cpu_s_per_gb": busy / max(1.0, rate) * 1e9}
    finally:
        server.kill()
        server.wait()


def _drops(network: Bridge) -> int:
    """Return the number of packets towards the requesting side that its queue dropped."""
    return sum(map(int, _DROPPED.findall(network.hub.run("tc", "-s", "qdisc", "show", "dev", "port1"))))


def _certificates(work: Path) -> list[str] | None:
    """Create a CA and one certificate that names both sides. Returns their paths."""
    if shutil.which("openssl") is None:
        click.echo("cachefs-bench: openssl is missing (Debian package openssl): TLS is not measured", err=True)
        return None
    new = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")
    cert, key = str(work / "cert.pem"), str(work / "key.pem")
    names = ",".join(f"DNS:node-{number}" for number in range(4))
    run([*new, "-subj", "/CN=bench", "-addext", f"subjectAltName={names}", "-keyout", key, "-out", cert])
    return [cert, cert, key]


def _summary(turns: Sequence[Turn], times: Sequence[float], beside: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "MB_per_s": round(median(turn["bytes_per_s"] for turn in turns) / 1e6),
        "receiver_s_per_GB": round(median(turn["cpu_s_per_gb"] for turn in turns), 2),
        "window": round(median(turn["window"] for turn in turns)),
    }
    if all("ratio" in turn for turn in turns):
        ratios = sorted(turn["ratio"] for turn in turns)
        found[f"{beside}_MB_per_s"] = round(median(turn["beside_bytes_per_s"] for turn in turns) / 1e6)
        found[f"{beside}_receiver_s_per_GB"] = round(median(turn["beside_cpu_s_per_gb"] for turn in turns), 2)
        found[f"of_{beside}"] = round(median(ratios), 2)
        found["ratios_from_to"] = [round(ratios[0], 2), round(ratios[-1], 2)]
    if len(times) > 1:
        found["p50_us"], found["p99_us"] = round(median(times) * 1e6), round(quantiles(times, n=100)[98] * 1e6)
    return {**found, "turns": _rounded(turns)}


def _rounded(turns: Sequence[Turn]) -> list[Turn]:
    return [{key: round(value, 3) if value < 100 else round(value) for key, value in turn.items()} for turn in turns]
