"""M4: under load a node joins, and then another one drains and leaves."""

import math
import subprocess
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.messages import Empty
from cachefs.rpc import CLUSTER
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_tools.bench.cluster.figures import at_most, document, read_document, trouble_document
from cachefs_tools.bench.cluster.placement import Placement, placement
from cachefs_tools.bench.cluster.run import Load, Run, running
from cachefs_tools.bench.cluster.steady import Say, patience
from cachefs_tools.bench.directory_node import DATASET
from cachefs_tools.lab.counters import Moment
from cachefs_tools.lab.job import Job, JobSettings, started_job
from cachefs_tools.lab.node import Node
from cachefs_tools.scratch_node import SCRATCH, environment_for, program

_LEAST_NODES: Final = 3
# Share of blocks away from their homes below which placement counts as settled.
_SETTLED: Final = 0.01
_LOOK_EVERY: Final = 1.0
# More epochs than are read: the jobs run until the changes are done.
_EPOCHS: Final = 400


def m4(load: Load, work: Path, say: Say, seconds: float) -> dict[str, Any]:
    """Run two jobs on the first nodes; the last node, which reads nothing, drains after another one has joined.

    With two jobs each block is placed at its home, so shares can be compared. seconds: most that a change may take.
    """
    if load.nodes < _LEAST_NODES:
        raise CachefsError(f"m4 needs {_LEAST_NODES} nodes at least: two that read and one that drains")
    nodes = load.nodes - 1  # plus one that joins
    load = replace(load, nodes=nodes, spare=1, source="etcd", capacity=max(load.capacity, 1.5), epochs=_EPOCHS)
    with ExitStack() as stack:
        run = stack.enter_context(running(load, work))
        *readers, leaving = run.nodes
        joining = run.cluster.nodes[nodes]
        jobs = [
            stack.enter_context(
                started_job(JobSettings(f"job{seed}", DATASET, load.files, _EPOCHS, seed, load.rate / 2), readers)
            )
            for seed in (1, 100_001)
        ]
        warm = [*readers, leaving]
        _read_once(run, jobs, say)
        settled = _settle(warm, seconds)
        _say_placement(say, f"before, after {settled:.0f} s", placement(warm))
        for job in jobs:
            for rank in job.ranks:
                rank.go("on")
        begin = run.take()
        say(f"{joining.name} joins")
        run.cluster.nodes[nodes].start(run.cluster.settings_of(joining))
        everybody = [*warm, joining]
        run.until_known(joining)
        _until_members(everybody, 1 + len(warm), seconds)
        joined_after = _settle(everybody, seconds)
        joined, with_it = run.take(), placement(everybody)
        _say_placement(say, f"joined, after {joined_after:.0f} s", with_it)
        say(f"{leaving.name} drains")
        drain_began = time.monotonic()
        _cachectl(leaving, "drain", seconds=seconds)
        drained_after = time.monotonic() - drain_began
        rest = [*readers, joining]
        _until_members(rest, len(rest), seconds)
        leaving.stop()
        left_after = _settle(rest, seconds)
        end, without = run.take(rest), placement(rest)
        _say_placement(say, f"drained in {drained_after:.0f} s, settled {left_after:.0f} s later", without)
        troubles = [one for job in jobs for rank in job.ranks for one in rank.progress.troubles]
        results = [result for job in jobs for result in job.results()]
    # Hashing distributes the homes, so the bound is the nodes' actual part, not 1 / nodes.
    least_in, least_out = with_it.belong[joining.name], with_it.belong[leaving.name]
    moved_in = (joined - begin).nodes[joining.name].peer_blocks
    moved_out = (end - joined).total.filled
    told = trouble_document(troubles, begin.when)
    checks = [
        at_most("reads that failed or were wrong", told["errors"] + told["wrong"], 0),
        at_most("longest read, seconds", told["longest_s"], 1.0),
        at_most("farthest from an equal part, after the join", with_it.off(), _most_off(load, len(everybody))),
        at_most("farthest from an equal part, after the drain", without.off(), _most_off(load, len(rest))),
        at_most("blocks moved by the join / the least", moved_in / least_in, 1.10),
        at_most("blocks moved by the drain / the least", moved_out / least_out, 1.10),
        at_most("blocks nowhere after the drain", without.nowhere, 0),
        at_most("origin bytes during the changes / dataset", _origin(end, begin, load), 0.01),
    ]
    return document(
        "m4", load, checks, joined=asdict(with_it), drained=asdict(without), reads=read_document(results),
        troubles=told, seconds={"join": joined_after, "drain": drained_after, "after drain": left_after},
    )  # fmt: skip


def _read_once(run: Run, jobs: list[Job], say: Say) -> None:
    say("both jobs read once")
    for job in jobs:
        job.begin()
    for job in jobs:
        job.join(0, patience(job.settings, len(job.ranks)))


def _settle(nodes: list[Node], seconds: float) -> float:
    """Wait until nearly all blocks are at home, at most *seconds*. Returns the seconds that passed."""
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds:
        found = placement(nodes)
        if found.missing() <= _SETTLED * found.blocks:
            break
        time.sleep(_LOOK_EVERY)
    return now


def _until_members(nodes: list[Node], count: int, seconds: float) -> None:
    """Wait until all nodes place blocks on *count* members."""
    deadline = time.monotonic() + seconds
    while True:
        seen = [
            [one.name for one in node.client.call(CLUSTER, Empty(), timeout=10).members if one.placing]
            for node in nodes
        ]
        if all(len(names) == count for names in seen):
            return
        if time.monotonic() > deadline:
            raise CachefsError(f"not within {seconds:.0f} s: {count} members that all place on; they see {seen}")
        time.sleep(0.2)


def _cachectl(node: Node, *command: str, seconds: float) -> None:
    """Run cachectl for a node. Raises CachefsError with its error output."""
    done = subprocess.run(
        [program("cachectl"), *command], env={**environment_for(SCRATCH), SOCKET_VARIABLE: str(node.socket)},
        capture_output=True, text=True, timeout=seconds + 60, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CachefsError(f"cachectl {' '.join(command)} on {node.name}: {done.stderr.strip()[-500:]}")


def _most_off(load: Load, nodes: int) -> float:
    """Return the allowed deviation from an equal part: 10 %, or three standard deviations of hashing so few blocks."""
    return max(0.10, 3 * math.sqrt((nodes - 1) / load.files))


def _say_placement(say: Say, when: str, found: Placement) -> None:
    parts = ", ".join(
        f"{name} {found.at_home[name] / found.blocks:.3f} of {count / found.blocks:.3f}"
        for name, count in sorted(found.belong.items())
    )
    say(f"  {when}: at home {parts}; nowhere {found.nowhere}")


def _origin(now: Moment, then: Moment, load: Load) -> float:
    return (now.origin_bytes - then.origin_bytes) / load.bytes
