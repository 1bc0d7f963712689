"""Files per second of a job that does nothing but read, with pushing and without, everything else equal.

The reader is hotread.c; its orders are published, since they can be known (see bench.hotread.first_round).
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

from cachefs.job_messages import JobEpoch, JobPublish, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_EPOCH
from cachefs_tools.bench.hotread import HotRead, compile_hotread, first_round
from cachefs_tools.bench.processor_time import accounted
from cachefs_tools.bench.push_node import (
    DATASET,
    PushNode,
    cold_mount,
    published,
    push_node,
    pushed,
    room_for,
)
from cachefs_tools.bench.reads import forget_pages
from cachefs_tools.bench.sample_data import sample_name, write_samples

WAYS: Final = {"pushing": (), "not pushing": ("no_push",)}
# A cold epoch, then some that find all pages in the kernel if they fit.
EPOCHS: Final = 3
READERS: Final = (1, 2)


@dataclass(frozen=True, slots=True)
class FullSpeed:
    """tier: `memory` or `ssd`, where the dataset is; turns: new mounts of each way; head_start: seconds from publishing
    to the first read; budget: of the page cache, as the mount option takes it, or empty for its default."""

    files: int
    size: int
    tier: str
    turns: int
    head_start: float
    budget: str = ""


def measure(work: Path, load: FullSpeed) -> list[dict[str, Any]]:
    source = work / "native"
    write_samples(source, load.files, load.size)
    names = [sample_name(number) for number in range(load.files)]
    hotread = compile_hotread(work, names)
    orders = [numpy.array(first_round(load.files, seed), "<u4") for seed in range(EPOCHS)]
    with push_node(work, source, load.tier, room_for(load.files, load.size)) as node:
        return [_by_readers(node, source, load, hotread, orders, readers) for readers in READERS]


def _by_readers(
    node: PushNode, source: Path, load: FullSpeed, hotread: HotRead, orders: Sequence[Any], readers: int
) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(load.turns):
        for way, options in WAYS.items():
            turns[way].append(_turn(node, source, load, hotread, orders, readers, options))
    first = {way: statistics.median(turn["mount_files_per_s"][0] for turn in found) for way, found in turns.items()}
    ratios = [ratio for turn in turns["pushing"] for ratio in turn["later_ratios"]]
    return {
        "run": f"{readers} readers",
        "first_epoch_files_per_s": first,
        "first_epoch_gain": round(first["pushing"] / first["not pushing"], 3),
        "later_epochs_beside_native": statistics.median(ratios),
        "turns": turns,
    }


def _turn(
    node: PushNode, source: Path, load: FullSpeed, hotread: HotRead, orders: Sequence[Any], readers: int,
    options: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """All epochs on a new mount, each after one on the native copy, which is as cold as the mount when it begins: so
    both get their pages in the same minute, and out of the same memory (see load_pages_alike)."""
    if load.budget and "no_push" not in options:
        options = [*options, f"page_cache_budget={load.budget}"]
    speeds: dict[Path, list[float]] = {source: []}
    requests = []
    with ExitStack() as stack:
        mount = stack.enter_context(cold_mount(node, options))
        speeds[mount.path] = []
        forget_pages(source, [sample_name(number) for number in range(load.files)])
        start = before = mount.counters()
        processor = stack.enter_context(accounted(*mount.pids()))
        for epoch in range(EPOCHS):
            speeds[source] += _files_per_s(hotread, source, readers, epoch)
            if epoch == 0:
                stack.enter_context(published(node, *_publications(load, readers)))
                _tell_orders(node, orders, readers)
                time.sleep(load.head_start)
            speeds[mount.path] += _files_per_s(hotread, mount.path, readers, epoch)
            after = mount.counters()
            requests.append((after["requests"] - before["requests"]) / load.files)
            before = after
        stack.close()
    native, ours = speeds.values()
    later = [round(one / other, 3) for one, other in zip(ours[1:], native[1:], strict=True)]
    return {"native_files_per_s": native, "mount_files_per_s": ours, "later_ratios": later,
            "fuse_requests_per_file": requests, "push": pushed(start, after),
            "processor_seconds": processor}  # fmt: skip


def _files_per_s(hotread: HotRead, root: Path, readers: int, epoch: int) -> list[float]:
    return [line["files_per_s"] for line in hotread.run(root, procs=readers, seed=epoch)]


def _publications(load: FullSpeed, readers: int) -> list[JobPublish]:
    spec = SamplerSpec(kind="explicit", size=load.files)
    return [
        JobPublish(
            job="hotread", dataset=DATASET, consumer=str(rank), spec=spec, map=SampleMap(kind="tree"), rank=rank,
            world_size=readers, pid=os.getpid(), source="cachefs-bench",
        )
        for rank in range(readers)
    ]  # fmt: skip


def _tell_orders(node: PushNode, orders: Sequence[Any], readers: int) -> None:
    for epoch, order in enumerate(orders):
        for rank in range(readers):
            share = order[rank::readers].tobytes()
            node.client.call(JOB_EPOCH, JobEpoch(job="hotread", consumer=str(rank), epoch=epoch, order=share))
