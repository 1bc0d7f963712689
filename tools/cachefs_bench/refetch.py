"""Counts bytes that `cachefs run` fetches from the origin, next to the least possible and to the mount alone.

A cell is one combination of tiers, page cache, options and jobs. It runs twice on an empty node: with the job
unmodified, and under `cachefs run`. All figures are counts; none is a time.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy
from cachefs_tools.child_programs import KILL_WITH_PARENT, mount_dataset, run_program

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName
from cachefs.messages import Empty
from cachefs.rpc import STALL_LIST, STATUS
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_bench.bounds import belady_reads
from cachefs_bench.directory_node import DATASET, run_directory_node
from cachefs_bench.lab.scratch_config import NodeSettings, TierSettings
from cachefs_bench.page_cache_limit import PageCacheLimit
from cachefs_bench.training_node import BLOCK_SIZE, MIN_TIER, SEGMENT_SIZE, budget_for

# Bytes of a file: one block.
SIZE: Final = BLOCK_SIZE
BATCH: Final = 2
# Shares of the dataset: capacity of small tiers, of a small page cache, and of a small budget of the pusher.
SMALL_TIERS, SMALL_PAGE_CACHE, SMALL_BUDGET = 0.5, 0.4, 0.15
JOB_SECONDS: Final = 600.0


class TierKind(StrEnum):
    """The tiers of the node."""

    MEMORY = "memory"
    SSD = "ssd"  # with the smallest possible memory tier
    BOTH = "both"


class PageCache(StrEnum):
    """The capacity of the kernel's page cache."""

    ALL = "all"  # the whole dataset
    PART = "part"  # less, limited by a control group
    NONE = "none"  # the program drops what it has read


@dataclass(frozen=True)
class Cell:
    """One combination."""

    tiers: TierKind = TierKind.MEMORY
    hold_all: bool = False  # the tiers have room for the dataset
    page_cache: PageCache = PageCache.ALL
    small_budget: bool = False  # a small `page_cache_budget` instead of the default
    push: bool = True
    jobs: int = 1
    distributed: bool = False  # a DistributedSampler instead of shuffle=True
    workers: int = 4

    @property
    def title(self) -> str:
        """A short description."""
        budget = "no_push" if not self.push else "budget small" if self.small_budget else "budget default"
        sampler = "distributed" if self.distributed else "shuffle"
        room = "> data" if self.hold_all else "< data"
        return (
            f"{self.tiers} {room}, pages {self.page_cache}, {budget}, {self.jobs} x {sampler}, {self.workers} workers"
        )


# Possible values of each field of a cell.
FIELD_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "tiers": tuple(TierKind), "hold_all": (False, True), "page_cache": tuple(PageCache), "small_budget": (False, True),
    "push": (True, False), "jobs": (1, 2), "distributed": (False, True), "workers": (4, 0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RefetchLoad:
    """The reads of each job."""

    files: int
    epochs: int
    rate: float  # samples per second of each job


def all_cells() -> Iterator[Cell]:
    """Yield every combination; a budget counts only if pages are pushed."""
    for values in itertools.product(*FIELD_VALUES.values()):
        cell = Cell(**dict(zip(FIELD_VALUES, values, strict=True)))
        if cell.push or not cell.small_budget:
            yield cell


def selected_cells() -> list[Cell]:
    """Return a selection: each kind of small tiers with each page cache, with and without pushing, and further cells so
    that every two values of two fields meet."""
    chosen = [
        Cell(tiers, page_cache=page_cache, push=push, small_budget=small)
        for tiers, page_cache in itertools.product(TierKind, PageCache)
        for push, small in ((True, False), (True, True), (False, False))
    ]
    left = {pair for cell in all_cells() for pair in _pairs(cell)} - {pair for cell in chosen for pair in _pairs(cell)}
    while left:
        best = max(all_cells(), key=lambda cell: len(left & _pairs(cell)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    values = [(field.name, getattr(cell, field.name)) for field in fields(cell)]
    return set(itertools.combinations(values, 2))


def measure(
    work: Path, load: RefetchLoad, cells: Sequence[Cell], report: Callable[[str], None], *, measures_mount: bool = True
) -> dict[str, Any]:
    """Run all cells. Raises CachefsError if a job fails, or no control group can be created.

    *work* is an empty directory; *report* receives progress messages; measures_mount: run the mount alone, too.
    """
    source = work / "files"
    _write(source, load.files)
    rows = []
    alone: dict[Cell, _CellResult] = {}
    for number, cell in enumerate(cells):
        # Push options make no difference if nothing is published.
        unpublished = replace(cell, push=True, small_budget=False)
        if measures_mount and unpublished not in alone:
            alone[unpublished] = _run(work, source, load, unpublished, run=False)
        row = measure_cell(work, source, load, cell, alone.get(unpublished))
        rows.append(row)
        report(
            f"{number + 1}/{len(cells)} {cell.title}: {row['run']['fetched']:.2f} datasets, least {row['least']:.2f}"
        )
    return {"load": asdict(load), "file_bytes": SIZE, "cells": rows}


def measure_cell(
    work: Path, source: Path, load: RefetchLoad, cell: Cell, alone: "_CellResult | None"
) -> dict[str, Any]:
    """Run one cell. Returns the datasets fetched by the mount alone and under `cachefs run`, the least possible, and
    the reads that waited for the origin."""
    run = _run(work, source, load, cell, run=True)
    capacity = load.files if cell.hold_all or cell.page_cache is PageCache.ALL else round(SMALL_TIERS * load.files)
    least = belady_reads(_interleave(run.orders), capacity) / load.files
    return {
        "cell": asdict(cell), "title": cell.title, "least": least, "over_least": run.fetched / least,
        "over_mount": run.fetched / alone.fetched if alone is not None else None,
        "mount": None if alone is None else _figures(alone), "run": _figures(run),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _CellResult:
    fetched: float  # datasets
    waited: int  # reads that waited for the origin
    waited_later: int  # the same, after the first epoch of a followed job
    orders: list[list[int]]  # by job: the samples it has read


def _figures(result: _CellResult) -> dict[str, Any]:
    return {"fetched": result.fetched, "waited": result.waited, "waited_later": result.waited_later}


def _interleave(orders: Sequence[Sequence[int]]) -> "numpy.typing.NDArray[numpy.int64]":
    """Interleave the reads of jobs that read at one pace."""
    return numpy.array(orders, numpy.int64).T.reshape(-1)


def _run(work: Path, source: Path, load: RefetchLoad, cell: Cell, *, run: bool) -> _CellResult:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r", dir=work)))
        total = load.files * SIZE
        limited = cell.page_cache is PageCache.PART
        limit = stack.enter_context(PageCacheLimit(int(SMALL_PAGE_CACHE * total)).hold_limit()) if limited else None
        node = stack.enter_context(run_directory_node(scratch, source, _settings(load, cell)))
        options = [] if cell.push else ["no_push"]
        options += [f"page_cache_budget={int(SMALL_BUDGET * total)}"] if cell.small_budget else []
        mountpoint = scratch / "mnt"
        group = limit.prefix if limit is not None else ()
        stack.enter_context(mount_dataset(DATASET, mountpoint, node.socket, scratch / "mount.log", options, group))
        variables = {**os.environ, SOCKET_VARIABLE: str(node.socket)}
        processes = []
        for number in range(cell.jobs):
            command, log = _command(scratch, load, cell, number, run=run), scratch / f"job{number}.log"
            processes.append(stack.enter_context(run_program(command, log, variables, (*KILL_WITH_PARENT, *group))))
        deadline = time.monotonic() + JOB_SECONDS
        for number, process in enumerate(processes):
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise CachefsError(f"{cell.title}: a job did not end within {JOB_SECONDS:.0f} s") from None
            if status:
                said = (scratch / f"job{number}.log").read_text(errors="replace")[-2000:].strip()
                raise CachefsError(f"{cell.title}: a job failed: {said}")
        fetched = node.client.call(STATUS, Empty()).fetched_bytes / total
        rows = [row for row in node.client.call(STALL_LIST, JobName(job="")).rows if row.source == "origin"]
        orders = [msgspec.json.decode((scratch / f"job{number}.json").read_bytes()) for number in range(cell.jobs)]
        later = sum(row.count for row in rows if row.epoch > 0)
        waited = sum(row.count for row in rows)
        return _CellResult(fetched, waited, later, [list(itertools.chain(*epochs)) for epochs in orders])


def _command(scratch: Path, load: RefetchLoad, cell: Cell, number: int, *, run: bool) -> list[str]:
    front = ["cachefs", "run", "--"] if run else []
    return [
        *front, sys.executable, "-m", "cachefs_bench.refetch_job", str(scratch / "mnt"),
        str(scratch / f"job{number}.json"), "--epochs", str(load.epochs), "--workers", str(cell.workers),
        "--batch", str(BATCH), "--rate", str(load.rate), "--seed", str(number),
        *(["--distributed"] if cell.distributed else []),
        *(["--drop"] if cell.page_cache is PageCache.NONE else []),
    ]  # fmt: skip


def _settings(load: RefetchLoad, cell: Cell) -> NodeSettings:
    wanted = round((1.2 if cell.hold_all else SMALL_TIERS) * load.files) * SIZE
    memory = {TierKind.MEMORY: wanted, TierKind.SSD: MIN_TIER + 8 * SIZE, TierKind.BOTH: wanted // 4}[cell.tiers]
    ssd = 0 if cell.tiers is TierKind.MEMORY else wanted - memory
    return NodeSettings(
        TierSettings(budget_for(memory), SEGMENT_SIZE), TierSettings(budget_for(ssd), SEGMENT_SIZE), BLOCK_SIZE
    )


def _write(source: Path, files: int) -> None:
    paths = sorted(source / f"{index % 10}" / f"{index // 10:06}.bin" for index in range(files))
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "little") + os.urandom(SIZE - 8))
