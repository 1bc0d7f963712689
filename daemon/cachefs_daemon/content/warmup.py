"""Warmups: bringing chosen files of a dataset onto the node before anybody reads them.

A warmup brings what the policy admits and nothing more, and every read that somebody waits for comes first.
"""

import asyncio
import itertools
import logging
import math
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from cachefs.block import block_count, block_length
from cachefs.errors import CachefsError, ConfigError, NotFound
from cachefs.messages import BlockRef, Warmup, WarmupProgress
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets import selection
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Workers of one warmup, and blocks that each of them asks for at once. Together they ask for twice the default of
# origin.max_connections, so that no connection is idle for a slow block. Twice as many workers or blocks made no warmup
# faster, but every other fetch slower.
WORKERS: Final = 8
BATCH: Final = 16
REPORT_SECONDS: Final = 0.2
# Warmups that have ended and are still shown.
MOST_ENDED: Final = 20


class WarmupState(StrEnum):
    """What became of a warmup, as WarmupProgress tells it."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """What a warmup is to bring."""

    # Entry numbers of the files, in the snapshot's order.
    files: "array[int]"
    # Blocks of all these files, and their bytes.
    blocks: int
    bytes: int
    # Paths that were asked for and are not in the snapshot.
    missing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bringing:
    """Blocks to bring."""

    dataset: str
    # Each with its length in bytes, in the order in which they are to come.
    refs: Iterator[tuple[BlockRef, int]]
    # How many they are, and their bytes.
    blocks: int
    bytes: int
    # Paths that were asked for and are not in the snapshot, and the first of them.
    missing: int = 0
    first_missing: str = ""
    # Id of the snapshot.
    snapshot: str = ""


@dataclass(slots=True, eq=False)
class Run:
    """One warmup, and how far it is."""

    id: int
    wanted: Bringing
    state: WarmupState = WarmupState.RUNNING
    # Blocks that are on the node now, of those that were asked for.
    blocks: int = 0
    # Bytes of the blocks that are on the node now.
    bytes: int = 0
    # Blocks that the policy did not admit.
    skipped: int = 0
    # Blocks that could not be fetched.
    failed: int = 0
    # Why the last one that failed could not be fetched.
    message: str = ""
    # What was asked for, where the warmup is to go on after a restart.
    request: Warmup | None = None
    task: "asyncio.Task[None]" = field(init=False)

    def progress(self) -> WarmupProgress:
        return WarmupProgress(
            id=self.id,
            state=self.state,
            blocks=self.blocks,
            blocks_total=self.wanted.blocks,
            bytes=self.bytes,
            bytes_total=self.wanted.bytes,
            skipped=self.skipped,
            failed=self.failed,
            message=self.message,
            dataset=self.wanted.dataset,
            missing=self.wanted.missing,
            first_missing=self.wanted.first_missing,
        )


class Warmups:
    """All warmups that run now, and the last that have ended. Used on the event loop."""

    def __init__(self, fetcher: Fetcher, threads: Threads) -> None:
        self._fetcher = fetcher
        self._threads = threads
        self._numbers = itertools.count(1)
        self._running: dict[int, Run] = {}  # by id
        self._ended: deque[Run] = deque(maxlen=MOST_ENDED)
        self.unsaved = False  # has `in_background` changed since it was saved? Whoever saves it resets this

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Run]:
        """Oldest first."""
        return iter(sorted([*self._ended, *self._running.values()], key=lambda run: run.id))

    def reading(self) -> set[tuple[str, str]]:
        """The datasets and snapshots whose blocks come now."""
        return {(run.wanted.dataset, run.wanted.snapshot) for run in self._running.values()}

    def in_background(self) -> list[Warmup]:
        """What is to go on after a restart."""
        return [run.request for run in self._running.values() if run.request is not None]

    async def run(self, snapshot: Snapshot, request: Warmup) -> AsyncGenerator[WarmupProgress, None]:
        """Start a warmup. Yields progress until its end, or one message where the request says not to wait.

        When a caller that waits goes away, the warmup ends. Raises NotFound, ConfigError.
        """
        run = await self.start(snapshot, request)
        if not request.wait:
            yield run.progress()
            return
        try:
            async for progress in _steps(run):
                yield progress
        finally:
            run.task.cancel()

    async def start(self, snapshot: Snapshot, request: Warmup) -> Run:
        """Start a warmup; where nobody waits for it, it goes on after a restart. Raises NotFound, ConfigError."""
        run = self.begin(await self._threads.background(_bringing, snapshot, request))
        if not request.wait:
            run.request = request
            self.unsaved = True
        return run

    async def watch(self, number: int) -> AsyncGenerator[WarmupProgress, None]:
        """Progress of the warmup with this id until its end, which whoever watches has no part in. Raises NotFound."""
        async for progress in _steps(self._get(number)):
            yield progress

    async def cancel(self, number: int) -> WarmupProgress:
        """End the warmup with this id; what has come stays. Raises NotFound."""
        run = self._get(number)
        run.task.cancel()
        await asyncio.wait([run.task])
        return run.progress()

    def _get(self, number: int) -> Run:
        run = next((run for run in self if run.id == number), None)
        if run is None:
            raise NotFound(f"there is no warmup {number}; `cachectl warmups` shows those there are")
        return run

    def begin(self, wanted: Bringing) -> Run:
        """Start to bring these blocks, in their order. To cancel its task ends it."""
        run = Run(next(self._numbers), wanted)
        run.task = asyncio.create_task(self._work(run))
        self._running[run.id] = run
        return run

    async def close(self) -> None:
        """End all warmups."""
        tasks = [run.task for run in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, run: Run) -> None:
        batches = _batches(run)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._fetch(run, batches))
            run.state = WarmupState.FAILED if run.failed else WarmupState.DONE
        except asyncio.CancelledError:
            run.state = WarmupState.CANCELLED
            raise
        except Exception as error:
            log.exception("warmup %d of %s failed unexpectedly", run.id, run.wanted.dataset)
            run.state, run.message = WarmupState.FAILED, f"internal error ({error!r}); see the daemon's log"
        finally:
            self._running.pop(run.id, None)
            self._ended.append(run)
            self.unsaved = self.unsaved or run.request is not None
            run.request = None
            # One that was stopped is remembered by who began it, and its list of blocks may have 100 MB.
            run.wanted = replace(run.wanted, refs=iter(()))
            log.info(
                "warmup %d of %s %s: %d of %d blocks here, %d not admitted, %d failed",
                run.id, run.wanted.dataset, run.state, run.blocks, run.wanted.blocks, run.skipped, run.failed,
            )  # fmt: skip

    async def _fetch(self, run: Run, batches: Iterator[list[tuple[BlockRef, int]]]) -> None:
        for batch in batches:
            outcomes = await self._fetcher.ahead([ref for ref, _ in batch])
            for (_, length), outcome in zip(batch, outcomes, strict=True):
                if outcome is None:
                    run.skipped += 1
                elif isinstance(outcome, CachefsError):
                    run.failed += 1
                    run.message = str(outcome)
                else:
                    run.blocks += 1
                    run.bytes += length


async def _steps(run: Run) -> AsyncGenerator[WarmupProgress, None]:
    """Progress until the end."""
    while not run.task.done():
        yield run.progress()
        await asyncio.wait([run.task], timeout=REPORT_SECONDS)
    yield run.progress()


def plan(snapshot: Snapshot, request: Warmup) -> WarmupPlan:
    """What the *request* asks for. To be called in a thread. It takes 8 bytes per file: 8 MB for a million files.

    Raises NotFound, ConfigError.
    """
    if not 0 < request.fraction <= 1:
        raise ConfigError(f"fraction {request.fraction:g}: expected more than 0 and at most 1")
    numbers = array("Q")
    sizes = array("Q")
    tops, missing = selection.split(snapshot, request.paths)
    if missing and not (tops and request.leave_out_missing):
        raise selection.not_there(snapshot, missing)
    for entry in selection.walk(snapshot, tops):
        numbers.append(entry.number)
        sizes.append(entry.size)
    count = math.ceil(len(numbers) * request.fraction)
    blocks = sum(block_count(size, snapshot.block_size) for size in sizes[:count])
    return WarmupPlan(
        numbers[:count], blocks, sum(sizes[:count]), [path.decode(errors="backslashreplace") for path in missing]
    )


def _bringing(snapshot: Snapshot, request: Warmup) -> Bringing:
    """To be called in a thread."""
    wanted = plan(snapshot, request)
    return Bringing(
        request.dataset, _blocks(snapshot, wanted.files), wanted.blocks, wanted.bytes,
        len(wanted.missing), next(iter(wanted.missing), ""), snapshot.id,
    )  # fmt: skip


def _batches(run: Run) -> Iterator[list[tuple[BlockRef, int]]]:
    """The blocks to bring, in groups of BATCH."""
    while batch := list(itertools.islice(run.wanted.refs, BATCH)):
        yield batch


def _blocks(snapshot: Snapshot, files: "array[int]") -> Iterator[tuple[BlockRef, int]]:
    """The blocks of these entries, each with its length in bytes."""
    for file in files:
        size, _ = snapshot.file(file)
        for number in range(block_count(size, snapshot.block_size)):
            ref = BlockRef(snapshot=snapshot.id, entry=file, number=number)
            yield ref, block_length(size, snapshot.block_size, number)
