"""Measures files per second of a job that only reads, with pushing and without; all else is equal.

The reader is hotread.c. Its orders are known beforehand (see bench.hotread.first_round_order), so they can be
published.
"""

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from cachefs.job_messages import JobEpoch, JobPublication, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_EPOCH
from cachefs_bench.hotread import HotRead, compile_hotread, first_round_order
from cachefs_bench.lab.scratch_node import DATASET, ScratchNode
from cachefs_bench.push_node import (
    PushMode,
    measure_processor_time,
    mount_cold,
    mount_options,
    publish_job,
    push_figures,
    run_push_node,
    tier_budget,
)
from cachefs_bench.sample_data import sample_name, write_samples
from cachefs_tools.kernel_pages import drop_pages

# The first epoch is cold. Later epochs find all pages in the kernel if the pages fit.
EPOCHS: Final = 3
READERS: Final = (1, 2)


@dataclass(frozen=True, slots=True)
class FullSpeedLoad:
    """The dataset, and how it is read."""

    files: int
    size: int  # bytes of each file
    tier: str  # where the dataset is: `memory` or `ssd`
    turns: int  # new mounts with pushing, and as many without
    head_start: float  # seconds from publishing to the first read
    budget: str = ""  # of the page cache, as the mount option takes it; empty: the mount's default


@dataclass(frozen=True, slots=True)
class PushSpeedBench:
    """Data shared by all turns."""

    load: FullSpeedLoad
    node: ScratchNode
    source: Path  # the native copy
    hotread: HotRead
    orders: Sequence[NDArray[numpy.uint32]]  # for each epoch an array of shape (files,): sample numbers

    def files_per_s(self, root: Path, readers: int, epoch: int) -> list[float]:
        """Read a tree once, in the order of the epoch, with *readers* processes."""
        return [line["files_per_s"] for line in self.hotread.run(root, procs=readers, seed=epoch)]


def measure(work: Path, load: FullSpeedLoad) -> list[dict[str, Any]]:
    """Return a document for each number of readers. *work* is an empty directory."""
    source = work / "native"
    write_samples(source, load.files, load.size)
    names = [sample_name(number) for number in range(load.files)]
    hotread = compile_hotread(work, names)
    orders = [numpy.array(first_round_order(load.files, seed), "<u4") for seed in range(EPOCHS)]
    with run_push_node(work, source, load.tier, tier_budget(load.files, load.size)) as node:
        bench = PushSpeedBench(load, node, source, hotread, orders)
        return [_measure_readers(bench, readers) for readers in READERS]


def _measure_readers(bench: PushSpeedBench, readers: int) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in PushMode}
    for _ in range(bench.load.turns):
        for mode in PushMode:
            turns[mode].append(_run_turn(bench, readers, mode))
    first = {mode: statistics.median(turn["mount_files_per_s"][0] for turn in found) for mode, found in turns.items()}
    ratios = [ratio for turn in turns[PushMode.PUSHING] for ratio in turn["later_ratios"]]
    return {
        "run": f"{readers} readers",
        "first_epoch_files_per_s": first,
        "first_epoch_gain": round(first[PushMode.PUSHING] / first[PushMode.NOT_PUSHING], 3),
        "later_epochs_beside_native": statistics.median(ratios),
        "turns": turns,
    }


def _run_turn(bench: PushSpeedBench, readers: int, mode: PushMode) -> dict[str, Any]:
    """Read all epochs on a new mount, each after the same epoch on the native copy.

    The native copy is as cold as the mount when the turn begins, so both get their pages in the same minute and out of
    the same memory (see load_pages_interleaved).
    """
    node, load, source = bench.node, bench.load, bench.source
    speeds: dict[Path, list[float]] = {source: []}
    requests = []
    with ExitStack() as stack:
        mount = stack.enter_context(mount_cold(node, mount_options(mode, load.budget)))
        speeds[mount.path] = []
        drop_pages(source / sample_name(number) for number in range(load.files))
        start = before = mount.settled_counters()
        processor = stack.enter_context(measure_processor_time(*mount.process_ids()))
        for epoch in range(EPOCHS):
            speeds[source] += bench.files_per_s(source, readers, epoch)
            if epoch == 0:
                stack.enter_context(publish_job(node, *_publications(load, readers)))
                _publish_orders(bench, readers)
                time.sleep(load.head_start)
            speeds[mount.path] += bench.files_per_s(mount.path, readers, epoch)
            after = mount.settled_counters()
            requests.append((after["requests"] - before["requests"]) / load.files)
            before = after
        stack.close()
    native, ours = speeds.values()
    later = [round(one / other, 3) for one, other in zip(ours[1:], native[1:], strict=True)]
    return {"native_files_per_s": native, "mount_files_per_s": ours, "later_ratios": later,
            "fuse_requests_per_file": requests, "push": push_figures(start, after),
            "processor_seconds": processor}  # fmt: skip


def _publications(load: FullSpeedLoad, readers: int) -> list[JobPublication]:
    spec = SamplerSpec(kind="explicit", size=load.files)
    return [
        JobPublication(
            job="hotread", dataset=DATASET, consumer=str(rank), spec=spec, map=SampleMap(kind="tree"), rank=rank,
            world_size=readers, pid=os.getpid(), source="cachefs-bench",
        )
        for rank in range(readers)
    ]  # fmt: skip


def _publish_orders(bench: PushSpeedBench, readers: int) -> None:
    for epoch, order in enumerate(bench.orders):
        for rank in range(readers):
            share = order[rank::readers].tobytes()
            bench.node.client.call(JOB_EPOCH, JobEpoch(job="hotread", consumer=str(rank), epoch=epoch, order=share))
