"""`cachefs-bench refetch`: counts bytes from the origin under `cachefs run`, next to the least and to the mount alone.

A cell is one combination of tiers, page cache, options and jobs. It runs twice on an empty node: with the job
unmodified, and under `cachefs run`. All figures are counts; none is a time.

`PageCacheLimit` is a control group whose processes share a page cache of a fixed size, whatever memory they need
besides.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName
from cachefs.messages import Empty
from cachefs.rpc import STALL_LIST, STATUS
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_bench.bounds import belady_reads
from cachefs_bench.lab.scratch_node import DATASET, NodeSettings, TierSettings, run_directory_node
from cachefs_bench.training_node import BLOCK_SIZE, MIN_TIER, SEGMENT_SIZE, budget_for
from cachefs_tools.child_programs import KILL_WITH_PARENT, mount_dataset, run_program

# Seconds between adjustments of the limit.
_ADJUST_SECONDS: Final = 0.05
# Bytes for the kernel's memory per process, which its statistics omit.
_KERNEL: Final = 16 << 20
_ROOT: Final = Path("/sys/fs/cgroup")
# Bytes of a file: one block.
SIZE: Final = BLOCK_SIZE
BATCH: Final = 2
# Shares of the dataset: capacity of small tiers, of a small page cache, and of a small budget of the pusher.
SMALL_TIERS, SMALL_PAGE_CACHE, SMALL_BUDGET = 0.5, 0.4, 0.15
JOB_SECONDS: Final = 600.0
_WIDTH = 132


class PageCacheLimit:
    """A control group (v1 or v2) whose limit follows the memory that its processes need, so that *size* bytes are
    always left for file pages."""

    def __init__(self, size: int) -> None:
        """size: bytes. Raises CachefsError if no control group can be created."""
        self._size = size
        self._group, self._is_v1 = _create_group(f"cachefs-bench-{os.getpid()}-{id(self)}")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._adjust_forever, daemon=True)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that run it in the group."""
        return "sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "sh"

    def _adjust_forever(self) -> None:
        names = ("total_rss", "total_shmem") if self._is_v1 else ("anon", "shmem", "kernel")
        limit = self._group / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")
        while not self._ended.wait(_ADJUST_SECONDS):
            pairs = (line.split() for line in (self._group / "memory.stat").read_text().splitlines())
            needed = sum(int(value) for name, value in pairs if name in names)
            try:
                limit.write_text(str(needed + self._size + _KERNEL))
            except OSError:  # v1: the pages cannot be reclaimed at once
                continue

    @contextmanager
    def hold_limit(self) -> Iterator["PageCacheLimit"]:
        """Keep the limit meanwhile. The group is removed at the end, after its processes."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()
            try:
                self._group.rmdir()
            except OSError as error:
                raise CachefsError(f"{self._group} cannot be removed: {error.strerror}") from None


def _create_group(name: str) -> tuple[Path, bool]:
    """Create a group below this process's group. Returns its directory, and whether it is of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if not (is_v1 or controllers == ""):
            continue
        group = (_ROOT / "memory" if is_v1 else _ROOT) / path.lstrip("/") / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "memory.stat").exists():
            return group, is_v1
        group.rmdir()
    raise CachefsError(
        "no control group with a memory limit can be made here; run this as root, or leave these rows out"
    )


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
                log_end = (scratch / f"job{number}.log").read_text(errors="replace")[-2000:].strip()
                raise CachefsError(f"{cell.title}: a job failed: {log_end}")
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


@click.command("refetch")
@click.option("--files", default=1000, show_default=True, type=click.IntRange(min=100), help="Files, of 256 KiB each.")
@click.option("--epochs", default=4, show_default=True, type=click.IntRange(min=2), help="Epochs of each job.")
@click.option("--rate", default=200.0, show_default=True, help="Samples a second of each job.")
@click.option("--every", is_flag=True, help="Run every combination: hours.  [default: 32 of them]")
@click.option("--only", default="", metavar="TEXT", help="Run those whose titles have this text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of a table.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work, with room for twice the files.  [default: a temporary directory]",
)  # fmt: skip
def refetch_command(every: bool, only: str, as_json: bool, directory: Path | None, **load: Any) -> None:
    """Count what jobs fetch from the origin, without and with `cachefs run`.

    For combinations of tiers, page cache, mount options and jobs: datasets fetched by the mount alone and under
    `cachefs run`, beside the least possible, and reads that waited for the origin. Needs torch, and root for its
    control groups.
    """
    cells = [cell for cell in (all_cells() if every else selected_cells()) if only in cell.title]
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
        document = measure(Path(work), RefetchLoad(**load), cells, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        Console(width=_WIDTH, highlight=False).print(table(document))


def table(document: dict[str, Any]) -> Table:
    """Return a table of the counts, a row per cell."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("datasets fetched")
    for title in ("least", "mount", "run", "of least", "of mount", "waited: mount", "run", "after epoch 1"):
        found.add_column(title, justify="right")
    for row in document["cells"]:
        mount, run = row["mount"], row["run"]
        found.add_row(
            row["title"], f"{row['least']:.2f}", "" if mount is None else f"{mount['fetched']:.2f}",
            f"{run['fetched']:.2f}", f"{row['over_least']:.3f}",
            "" if mount is None else f"{row['over_mount']:.3f}", "" if mount is None else f"{mount['waited']:,}",
            f"{run['waited']:,}", f"{run['waited_later']:,}",
        )  # fmt: skip
    return found
