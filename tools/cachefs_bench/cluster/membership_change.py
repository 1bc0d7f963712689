"""M4: under load a node joins, and then another one drains and leaves.

Where blocks are is compared with where they belong according to a node's members. Each file of a lab is one block.
"""

import math
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy
import xxhash

from cachefs.block import block_key
from cachefs.errors import CachefsError
from cachefs.messages import DatasetName, Empty, Selection
from cachefs.planning.cluster.homes import BlockHomes
from cachefs.planning.cluster.rendezvous import RingMember, key_hashes
from cachefs.rpc import CACHED, CLUSTER, DATASET_SHOW
from cachefs.snapshot import Snapshot
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_bench.cluster.run import (
    ClusterLoad,
    ClusterRun,
    check_at_most,
    document,
    problem_document,
    read_document,
    run_cluster,
)
from cachefs_bench.cluster.steady import ReportLine, epoch_timeout
from cachefs_bench.lab.cluster import ClusterCounters
from cachefs_bench.lab.job import JobSettings, LabJob, start_job
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch_node import DATASET, SCRATCH_CREDENTIALS, environment_with
from cachefs_tools.child_programs import program_path

_MIN_NODES: Final = 3
# Share of blocks away from their homes below which placement counts as settled.
_SETTLED: Final = 0.01
_POLL_SECONDS: Final = 1.0
# More epochs than are read: the jobs run until the changes are done.
_EPOCHS: Final = 400


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """The blocks of the dataset at one moment."""

    blocks: int
    belong: dict[str, int]  # by node: number of blocks whose home it is
    at_home: dict[str, int]  # by node: blocks at home there
    held: dict[str, int]  # by node: blocks held
    nowhere: int  # blocks that no node holds

    def max_deviation(self) -> float:
        """Return the deviation of the worst node from an equal part, counting blocks at home: 0 is ideal."""
        ideal = self.blocks / len(self.belong) if self.belong else 0.0
        return max((abs(count - ideal) / ideal for count in self.at_home.values()), default=1.0)

    def count_away_from_home(self) -> int:
        """Return the number of blocks that are not at home."""
        return self.blocks - sum(self.at_home.values())


def find_blocks(nodes: Sequence[LabNode]) -> BlockPlacement:
    """Return where the blocks are on these nodes; the first node's view decides where they belong."""
    homes = homes_by_path(nodes[0])
    found = {node.name: held_bytes(node).keys() for node in nodes}
    everywhere = set().union(*found.values())
    belong = Counter(homes.values())
    at_home = Counter(name for path, name in homes.items() if path in found.get(name, ()))
    return BlockPlacement(
        len(homes), dict(belong), {name: at_home[name] for name in belong},
        {name: len(paths) for name, paths in found.items()}, len(homes.keys() - everywhere),
    )  # fmt: skip


def homes_by_path(node: LabNode, dataset: str = DATASET) -> dict[bytes, str]:
    """Return by file path the name of the home node of its block, in this node's view of the cluster."""
    members = [member for member in node.client.call(CLUSTER, Empty(), timeout=10).members if member.placing]
    view = node.client.call(DATASET_SHOW, DatasetName(name=dataset)).dataset
    snapshot = Snapshot(Path(view.path))
    try:
        contents = list(snapshot.contents())
        paths = [snapshot.path(number) for number, _, _ in contents]
    finally:
        snapshot.close()
    keys = numpy.frombuffer(b"".join(block_key(content, 0) for _, _, content in contents), numpy.uint8)
    homes = BlockHomes(key_hashes(keys.reshape(-1, len(keys) // len(contents))))
    homes.set_members(
        [RingMember(one.id, xxhash.xxh3_64_intdigest(one.id.encode()), one.weight, one.zone) for one in members]
    )
    names = {member.id: member.name for member in members}
    return {
        path: names[homes.members[number].id]
        for path, number in zip(paths, homes.first.tolist(), strict=True)
        if number < len(homes.members)
    }


def held_bytes(node: LabNode) -> dict[bytes, int]:
    """Return by file path the bytes in the tiers of a node."""
    found: dict[bytes, int] = {}
    for page in node.client.stream_responses(CACHED, Selection(dataset=DATASET)):
        found.update((file.path, sum(file.cached)) for file in page.files if any(file.cached))
    return found


def m4(load: ClusterLoad, work: Path, report: ReportLine, seconds: float) -> dict[str, Any]:
    """Run two jobs on the first nodes; the last node, which reads nothing, drains after another one has joined.

    With two jobs each block is placed at its home, so shares can be compared. seconds: most that a change may take.
    """
    if load.nodes < _MIN_NODES:
        raise CachefsError(f"m4 needs {_MIN_NODES} nodes at least: two that read and one that drains")
    nodes = load.nodes - 1  # plus one that joins
    load = replace(load, nodes=nodes, spare=1, source="etcd", capacity=max(load.capacity, 1.5), epochs=_EPOCHS)
    with ExitStack() as stack:
        run = stack.enter_context(run_cluster(load, work))
        *readers, leaving = run.nodes
        joining = run.cluster.nodes[nodes]
        jobs = [
            stack.enter_context(
                start_job(JobSettings(f"job{seed}", DATASET, load.files, _EPOCHS, seed, load.rate / 2), readers)
            )
            for seed in (1, 100_001)
        ]
        warm = [*readers, leaving]
        _read_once(run, jobs, report)
        settled = _wait_settled(warm, seconds)
        _report_placement(report, f"before, after {settled:.0f} s", find_blocks(warm))
        for job in jobs:
            for rank in job.ranks:
                rank.start_epoch("on")
        begin = run.read_counters()
        report(f"{joining.name} joins")
        run.cluster.nodes[nodes].start(run.cluster.node_settings(joining))
        all_nodes = [*warm, joining]
        run.wait_for_dataset(joining)
        _wait_for_members(all_nodes, 1 + len(warm), seconds)
        joined_after = _wait_settled(all_nodes, seconds)
        joined, joined_placement = run.read_counters(), find_blocks(all_nodes)
        _report_placement(report, f"joined, after {joined_after:.0f} s", joined_placement)
        report(f"{leaving.name} drains")
        drain_began = time.monotonic()
        _cachectl(leaving, "drain", seconds=seconds)
        drained_after = time.monotonic() - drain_began
        remaining = [*readers, joining]
        _wait_for_members(remaining, len(remaining), seconds)
        leaving.stop()
        left_after = _wait_settled(remaining, seconds)
        end, drained_placement = run.read_counters(remaining), find_blocks(remaining)
        _report_placement(
            report, f"drained in {drained_after:.0f} s, settled {left_after:.0f} s later", drained_placement
        )
        troubles = [trouble for job in jobs for rank in job.ranks for trouble in rank.progress.troubles]
        results = [result for job in jobs for result in job.results()]
    # Hashing distributes the homes, so the bound is the nodes' actual part, not 1 / nodes.
    least_in, least_out = joined_placement.belong[joining.name], joined_placement.belong[leaving.name]
    moved_in = (joined - begin).nodes[joining.name].peer_blocks
    moved_out = (end - joined).total.filled
    problems = problem_document(troubles, begin.when)
    checks = [
        check_at_most("reads that failed or were wrong", problems["errors"] + problems["wrong"], 0),
        check_at_most("longest read, seconds", problems["longest_s"], 1.0),
        check_at_most(
            "farthest from an equal part, after the join",
            joined_placement.max_deviation(),
            _max_deviation(load, len(all_nodes)),
        ),
        check_at_most(
            "farthest from an equal part, after the drain",
            drained_placement.max_deviation(),
            _max_deviation(load, len(remaining)),
        ),
        check_at_most("blocks moved by the join / the least", moved_in / least_in, 1.10),
        check_at_most("blocks moved by the drain / the least", moved_out / least_out, 1.10),
        check_at_most("blocks nowhere after the drain", drained_placement.nowhere, 0),
        check_at_most("origin bytes during the changes / dataset", _origin_share(end, begin, load), 0.01),
    ]
    return document(
        "m4", load, checks, joined=asdict(joined_placement), drained=asdict(drained_placement),
        reads=read_document(results), troubles=problems,
        seconds={"join": joined_after, "drain": drained_after, "after drain": left_after},
    )  # fmt: skip


def _read_once(run: ClusterRun, jobs: list[LabJob], report: ReportLine) -> None:
    report("both jobs read once")
    for job in jobs:
        job.begin_epoch()
    for job in jobs:
        job.wait_for_epoch(0, epoch_timeout(job.settings, len(job.ranks)))


def _wait_settled(nodes: list[LabNode], seconds: float) -> float:
    """Wait until nearly all blocks are at home, at most *seconds*. Returns the seconds that passed."""
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds:
        found = find_blocks(nodes)
        if found.count_away_from_home() <= _SETTLED * found.blocks:
            break
        time.sleep(_POLL_SECONDS)
    return now


def _wait_for_members(nodes: list[LabNode], count: int, seconds: float) -> None:
    """Wait until all nodes place blocks on *count* members."""
    deadline = time.monotonic() + seconds
    while True:
        seen = [
            [member.name for member in node.client.call(CLUSTER, Empty(), timeout=10).members if member.placing]
            for node in nodes
        ]
        if all(len(names) == count for names in seen):
            return
        if time.monotonic() > deadline:
            raise CachefsError(f"not within {seconds:.0f} s: {count} members that all place on; they see {seen}")
        time.sleep(0.2)


def _cachectl(node: LabNode, *command: str, seconds: float) -> None:
    """Run cachectl for a node. Raises CachefsError with its error output."""
    done = subprocess.run(
        [program_path("cachectl"), *command],
        env={**environment_with(SCRATCH_CREDENTIALS), SOCKET_VARIABLE: str(node.socket)},
        capture_output=True, text=True, timeout=seconds + 60, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CachefsError(f"cachectl {' '.join(command)} on {node.name}: {done.stderr.strip()[-500:]}")


def _max_deviation(load: ClusterLoad, nodes: int) -> float:
    """Return the allowed deviation from an equal part: 10 %, or three standard deviations of hashing so few blocks."""
    return max(0.10, 3 * math.sqrt((nodes - 1) / load.files))


def _report_placement(report: ReportLine, when: str, found: BlockPlacement) -> None:
    parts = ", ".join(
        f"{name} {found.at_home[name] / found.blocks:.3f} of {count / found.blocks:.3f}"
        for name, count in sorted(found.belong.items())
    )
    report(f"  {when}: at home {parts}; nowhere {found.nowhere}")


def _origin_share(now: ClusterCounters, then: ClusterCounters, load: ClusterLoad) -> float:
    return (now.origin_bytes - then.origin_bytes) / load.bytes
