"""`cachefs-bench peers`: measures block transfers between nodes (M6), next to iperf3 and a plain copy over TLS."""

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

from cachefs.errors import CachefsError
from cachefs_bench.lab.bridge import Bridge, bridge_network
from cachefs_bench.lab.host import LOOPBACK, LabHost, run_command
from cachefs_bench.lab.scratch_node import memory_directory
from cachefs_cluster.peers.peer import MAX_CONNECTIONS
from cachefs_tools.child_programs import KILL_WITH_PARENT, Child, wait_or_kill

SMALL: Final = 110_000
LARGE: Final = 4 << 20
# Measurements between two hosts: bytes of a block, and whether the connection is encrypted; PARTS: all measurements.
_PAIRS: Final[Mapping[str, tuple[int, bool]]] = {
    "110 KB": (SMALL, False),
    "4 MiB": (LARGE, False),
    "110 KB, TLS": (SMALL, True),
    "4 MiB, TLS": (LARGE, True),
}
THREE_TO_ONE: Final = "three to one"
TWO_RAILS: Final = "two rails"
PARTS: Final = (*_PAIRS, THREE_TO_ONE, TWO_RAILS)
# Seconds before the first turn, in which the window adapts.
_WARM_UP_SECONDS: Final = 2.0
# Two rails: bytes of a switch's queue in which no packet is lost, and blocks in flight.
_DEEP_QUEUE: Final = 4 << 20
_RAIL_BLOCKS: Final = 48
_SIDE: Final = "cachefs_bench.peer_side"
_SECONDS: Final = 120.0
_DROPPED: Final = re.compile(r"dropped (\d+)")

TurnFigures = dict[str, float]


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
            hosts: Sequence[LabHost] = (LOOPBACK, LOOPBACK)
            network = None
        else:
            network = stack.enter_context(bridge_network(4, rails=2))
            hosts = network.hosts
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-bench-")))
        certificates = _certificates(work) if any(part.endswith("TLS") for part in parts) else None
        document: dict[str, Any] = {"between": "loopback" if load.loopback else "namespaces", "pairs": {}}
        if shutil.which("iperf3") is None:
            document["missing"] = "iperf3 (Debian package iperf3): there is nothing to compare plain connections with"
            click.echo(f"cachefs-bench: {document['missing']}", err=True)
        for part, (_, is_tls) in _PAIRS.items():
            if part in parts and (certificates is not None or not is_tls):
                document["pairs"][part] = _measure_pair(load, hosts, part, certificates if is_tls else None)
        if network is not None and load.megabits and THREE_TO_ONE in parts:
            document["three_to_one"] = _measure_incast(load, network)
        if network is not None and load.megabits and TWO_RAILS in parts:
            document["two_rails"] = _measure_rails(load, network)
    return document


def _measure_pair(load: PeerLoad, hosts: Sequence[LabHost], part: str, tls: Sequence[str] | None) -> dict[str, Any]:
    """Measure one pair of hosts and its comparison, in turns: a machine is slow for seconds at a time."""
    giver, asker, size = hosts[1], hosts[0], _PAIRS[part][0]
    turns: list[TurnFigures] = []
    times: list[float] = []
    parameters = _side_parameters(load, size, giver, asker, tls)
    with ExitStack() as stack:
        ours = _start_pair(stack, parameters, giver, asker, "")
        beside: Callable[[], TurnFigures] | None = None
        if tls is not None:
            copy = _start_pair(stack, parameters, giver, asker, "copy-")
            beside = partial(copy.send_request, "many", load.seconds)
        elif shutil.which("iperf3") is not None:
            beside = partial(_iperf, giver, asker, load.seconds)
        ours.send_request("many", _WARM_UP_SECONDS)
        for number in range(load.turns):
            click.echo(f"  {part}, turn {number + 1} of {load.turns}", err=True)
            # The order alternates.
            before = beside() if beside is not None and number % 2 else None
            turn = ours.send_request("many", load.seconds)
            other = before or (beside() if beside is not None else None)
            if other is not None:
                turn["beside_bytes_per_s"], turn["beside_cpu_s_per_gb"] = other["bytes_per_s"], other["cpu_s_per_gb"]
                turn["ratio"] = turn["bytes_per_s"] / other["bytes_per_s"]
            turns.append(turn)
            if size == SMALL:
                times += ours.send_request("one by one", max(1, load.singles // load.turns))["seconds"]
    return _summary(turns, times, "a plain TLS copy" if tls else "iperf3")


def _measure_incast(load: PeerLoad, network: Bridge) -> dict[str, Any]:
    """Measure three nodes that serve one over a slow link, in turns with one connection of iperf3."""
    asker, givers = network.hosts[0], network.hosts[1:4]
    network.limit_bandwidth(0, load.megabits, load.queue)
    network.set_offload(on=False)
    turns: list[TurnFigures] = []
    try:
        with ExitStack() as stack:
            parameters = _side_parameters(load, SMALL, givers[0], asker, None)
            addresses = []
            for number, giver in enumerate(givers, 1):
                root = stack.enter_context(memory_directory("cachefs-bench-"))
                role = {
                    **parameters,
                    "root": str(root),
                    "number": number,
                    "host": giver.address,
                    "hosts": [giver.address],
                }
                ready = stack.enter_context(_run_side(giver, "give", role)).read_line()
                addresses.append([number, giver.address, ready["port"]])
            side = stack.enter_context(_run_side(asker, "ask", {**parameters, "givers": addresses}))
            side.send_request("many", _WARM_UP_SECONDS)
            for number in range(load.turns):
                click.echo(f"  three to one over {load.megabits} Mbit/s, turn {number + 1} of {load.turns}", err=True)
                before = _drops(network)
                turn = side.send_request("many", load.seconds)
                turn["dropped_packets"] = _drops(network) - before
                turn["of_link"] = _link_share(turn, load)
                if shutil.which("iperf3") is not None:
                    turn["iperf3_of_link"] = _link_share(_iperf(givers[0], asker, load.seconds), load)
                    turn["ratio"] = turn["of_link"] / turn["iperf3_of_link"]
                turns.append(turn)
    finally:
        network.set_offload(on=True)
        network.remove_limit(0)
    found = {
        "of_link": round(median(turn["of_link"] for turn in turns), 3),
        "dropped_packets": sum(turn["dropped_packets"] for turn in turns),
        "window": round(median(turn["window"] for turn in turns)),
    }
    if all("iperf3_of_link" in turn for turn in turns):
        found["iperf3_of_link"] = round(median(turn["iperf3_of_link"] for turn in turns), 3)
        found["of_iperf3"] = round(median(turn["ratio"] for turn in turns), 2)
    return {**found, "turns": _rounded(turns)}


def _measure_rails(load: PeerLoad, network: Bridge) -> dict[str, Any]:
    """Measure a pair of hosts over two slow links, in turns with the same pair over one of them."""
    giver, asker = network.hosts[1], network.hosts[0]
    hosts = [network.address(1, rail) for rail in range(2)]
    for rail in range(2):
        network.limit_bandwidth(0, load.megabits, _DEEP_QUEUE, rail)
    network.set_offload(on=False)
    turns: list[TurnFigures] = []
    try:
        with ExitStack() as stack:
            parameters = {**_side_parameters(load, SMALL, giver, asker, None), "outstanding": _RAIL_BLOCKS}
            root = stack.enter_context(memory_directory("cachefs-bench-"))
            role = {**parameters, "root": str(root), "hosts": hosts}
            ready = stack.enter_context(_run_side(giver, "give", role)).read_line()
            one, two = (
                stack.enter_context(
                    _run_side(asker, "ask", {**parameters, "givers": [[1, *hosts[:1], ready["port"], *more]]})
                )
                for more in ([], hosts[1:])
            )
            for side in (one, two):
                side.send_request("many", _WARM_UP_SECONDS)
            for number in range(load.turns):
                click.echo(f"  two rails of {load.megabits} Mbit/s, turn {number + 1} of {load.turns}", err=True)
                before = [network.received_bytes(0, rail) for rail in range(2)]
                turn = two.send_request("many", load.seconds)
                came = [network.received_bytes(0, rail) - before[rail] for rail in range(2)]
                turn["share_of_lesser_rail"] = min(came) / sum(came)
                turn["one_rail_bytes_per_s"] = one.send_request("many", load.seconds)["bytes_per_s"]
                turn["ratio"] = turn["bytes_per_s"] / turn["one_rail_bytes_per_s"]
                turns.append(turn)
    finally:
        network.set_offload(on=True)
        for rail in range(2):
            network.remove_limit(0, rail)
    names = ("ratio", "share_of_lesser_rail")
    return {**{name: round(median(turn[name] for turn in turns), 2) for name in names}, "turns": _rounded(turns)}


def _link_share(turn: TurnFigures, load: PeerLoad) -> float:
    return turn["bytes_per_s"] * 8 / 1e6 / load.megabits


def _side_parameters(
    load: PeerLoad, size: int, giver: LabHost, asker: LabHost, tls: Sequence[str] | None
) -> dict[str, Any]:
    return {
        "size": size,
        "number": 1,
        "host": giver.address,
        "hosts": [giver.address],
        "asker": asker.address,
        "tls": tls,
        "outstanding": max(3, load.outstanding // size),
        "window": load.window,
        "connections": MAX_CONNECTIONS[0],
    }


class _SideProcess:
    def __init__(self, process: Child) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout

    def read_line(self) -> dict[str, Any]:
        """Return the side's next line. Raises CachefsError if the side has ended."""
        line = self._from.readline()
        if not line:
            raise CachefsError(f"a side of the benchmark has ended with status {self._process.wait()}")
        document: dict[str, Any] = json.loads(line)
        return document

    def send_request(self, what: str, amount: float) -> dict[str, Any]:
        """Send a request, and return the answer."""
        with suppress(BrokenPipeError):  # the side has ended, which `read_line` reports
            self._to.write(json.dumps([what, amount]).encode() + b"\n")
            self._to.flush()
        return self.read_line()


def _start_pair(
    stack: ExitStack, parameters: dict[str, Any], giver: LabHost, asker: LabHost, kind: str
) -> _SideProcess:
    """Start both sides, and return the requesting one."""
    root = stack.enter_context(memory_directory("cachefs-bench-"))
    ready = stack.enter_context(_run_side(giver, f"{kind}give", {**parameters, "root": str(root)})).read_line()
    addresses = [[parameters["number"], giver.address, ready["port"]]]
    return stack.enter_context(_run_side(asker, f"{kind}ask", {**parameters, "givers": addresses}))


@contextmanager
def _run_side(host: LabHost, role: str, parameters: dict[str, Any]) -> Iterator[_SideProcess]:
    command = [*KILL_WITH_PARENT, *host.enter_command, sys.executable, "-m", _SIDE, role, json.dumps(parameters)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield _SideProcess(process)
    finally:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        wait_or_kill(process)


def _iperf(giver: LabHost, asker: LabHost, seconds: float) -> TurnFigures:
    duration = max(1, round(seconds))  # iperf3 takes whole seconds
    port = str(asker.free_ports(1)[0])
    server = subprocess.Popen(
        [*KILL_WITH_PARENT, *asker.enter_command, "iperf3", "-s", "-1", "--forceflush", "-p", port, "-B",
         asker.address],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                raise CachefsError("iperf3 does not start")
        text = run_command([*giver.enter_command, "iperf3", "-c", asker.address, "-p", port, "-t", str(duration), "-J"])
        end = json.loads(text)["end"]
        rate = float(end["sum_received"]["bits_per_second"]) / 8
        busy = float(end["cpu_utilization_percent"]["remote_total"]) / 100
        return {"bytes_per_s": rate, "cpu_s_per_gb": busy / max(1.0, rate) * 1e9}
    finally:
        server.kill()
        server.wait()


def _drops(network: Bridge) -> int:
    """Return the number of packets towards the requesting side that its queue dropped."""
    return sum(map(int, _DROPPED.findall(network.hub.run_command("tc", "-s", "qdisc", "show", "dev", "port1"))))


def _certificates(work: Path) -> list[str] | None:
    """Create a CA and one certificate that names both sides. Returns their paths."""
    if shutil.which("openssl") is None:
        click.echo("cachefs-bench: openssl is missing (Debian package openssl): TLS is not measured", err=True)
        return None
    new = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")
    cert, key = str(work / "cert.pem"), str(work / "key.pem")
    names = ",".join(f"DNS:node-{number}" for number in range(4))
    run_command([*new, "-subj", "/CN=bench", "-addext", f"subjectAltName={names}", "-keyout", key, "-out", cert])
    return [cert, cert, key]


def _summary(turns: Sequence[TurnFigures], times: Sequence[float], beside: str) -> dict[str, Any]:
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


def _rounded(turns: Sequence[TurnFigures]) -> list[TurnFigures]:
    return [{key: round(value, 3) if value < 100 else round(value) for key, value in turn.items()} for turn in turns]


@click.command("peers")
@click.option("--seconds", default=1.0, show_default=True, type=click.FloatRange(min=0.2), help="Of each turn.")
@click.option(
    "--turns", default=9, show_default=True, type=click.IntRange(min=1), help="How often each way has a turn."
)
@click.option(
    "--singles", default=2000, show_default=True, type=click.IntRange(min=2), help="Blocks asked for one at a time."
)
@click.option(
    "--megabits", default=1000, show_default=True, type=click.IntRange(min=0),
    help="Of the link of three nodes to one; 0 leaves that out.",
)  # fmt: skip
@click.option("--window", default=0, help="Bytes that may be on the way.  [default: the window is learnt]")
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Only this; several times.")
@click.option("--loopback", is_flag=True, help="On the loopback address in place of network namespaces: needs no root.")
def peers_command(only: tuple[str, ...], **options: Any) -> None:
    """Measure blocks from node to node: of 110 KB and of 4 MiB, one pair, without and with TLS.

    In the same run, iperf3 (Debian package iperf3) shows what the network does, and a plain copy over TLS with as many
    connections what encryption leaves of it. Then three nodes give to one over a slow link, and one to one over two.
    """
    load = PeerLoad(**options)
    click.echo(json.dumps(measure(load, only or PARTS), indent=2))
