"""Warmups: fetch chosen files of a dataset onto this node before they are read.

A warmup fetches only blocks that the policy admits, and reads on demand come first.
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

# Workers of one warmup, and blocks that each requests at once. Together they request twice the default of
# origin.max_connections, so that no connection idles behind a slow block. Twice as many workers or blocks made no
# warmup faster, but every other fetch slower.
WORKERS: Final = 8
BATCH: Final = 16
REPORT_SECONDS: Final = 0.2
# Ended warmups that are still listed.
MOST_ENDED: Final = 20


class WarmupState(StrEnum):
    """State of a warmup, as reported in WarmupProgress."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """Files and blocks to warm."""

    # Entry numbers of the files, in the snapshot's order.
    files: "array[int]"
    # Blocks of all files, and their bytes.
    blocks: int
    bytes: int
    # Requested paths that are not in the snapshot.
    missing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bringing:
    """Blocks to fetch."""

    dataset: str
    # Blocks with their lengths in bytes, in order of fetching.
    refs: Iterator[tuple[BlockRef, int]]
    # Number of blocks, and their bytes.
    blocks: int
    bytes: int
    # Number of requested paths that are not in the snapshot, and the first of them.
    missing: int = 0
    first_missing: str = ""
    # Id of the snapshot.
    snapshot: str = ""


@dataclass(slots=True, eq=False)
class Run:
    """One warmup and its progress."""

    id: int
    wanted: Bringing
    state: WarmupState = WarmupState.RUNNING
    # Requested blocks that are on the node now.
    blocks: int = 0
    # Bytes of these blocks.
    bytes: int = 0
    # Blocks that the policy did not admit.
    skipped: int = 0
    # Blocks that could not be fetched.
    failed: int = 0
    # Error of the last failed block.
    message: str = ""
    # The request, if the warmup is to continue after a restart.
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
    """Running warmups, and the last ended ones. Used on the event loop."""

    def __init__(self, fetcher: Fetcher, threads: Threads) -> None:
        self._fetcher = fetcher
        self._threads = threads
        self._numbers = itertools.count(1)
        self._running: dict[int, Run] = {}  # by id
        self._ended: deque[Run] = deque(maxlen=MOST_ENDED)
        self.unsaved = False  # `in_background` has changed since it was saved; reset by the code that saves it

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Run]:
        """Iterate over warmups, oldest first."""
        return iter(sorted([*self._ended, *self._running.values()], key=lambda run: run.id))

    def reading(self) -> set[tuple[str, str]]:
        """Return datasets and snapshots of the running warmups."""
        return {(run.wanted.dataset, run.wanted.snapshot) for run in self._running.values()}

    def in_background(self) -> list[Warmup]:
        """Return the requests to continue after a restart."""
        return [run.request for run in self._running.values() if run.request is not None]

    async def run(self, snapshot: Snapshot, request: Warmup) -> AsyncGenerator[WarmupProgress, None]:
        """Start a warmup. Yields progress until its end, or a single message if the request says not to wait.

        If a waiting caller goes away, the warmup ends. Raises NotFound, ConfigError.
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
        """Start a warmup. Without a waiting caller, it continues after a restart. Raises NotFound, ConfigError."""
        run = self.begin(await self._threads.background(_bringing, snapshot, request))
        if not request.wait:
            run.request = request
            self.unsaved = True
        return run

    async def watch(self, number: int) -> AsyncGenerator[WarmupProgress, None]:
        """Yield the progress of a warmup until its end, which does not depend on the caller. Raises NotFound."""
        async for progress in _steps(self._get(number)):
            yield progress

    async def cancel(self, number: int) -> WarmupProgress:
        """Cancel a warmup; fetched blocks stay. Raises NotFound."""
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
        """Start to fetch blocks in order. Cancel the task of the returned Run to end it."""
        run = Run(next(self._numbers), wanted)
        run.task = asyncio.create_task(self._work(run))
        self._running[run.id] = run
        return run

    async def close(self) -> None:
        """Cancel all warmups."""
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
            # The Run of a cancelled warmup stays referenced, and its list of blocks may take 100 MB.
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
    while not run.task.done():
        yield run.progress()
        await asyncio.wait([run.task], timeout=REPORT_SECONDS)
    yield run.progress()


def plan(snapshot: Snapshot, request: Warmup) -> WarmupPlan:
    """Return the plan of a request. Call in a thread. Takes 8 bytes per file: 8 MB for a million files.

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
    """Return the blocks that a request asks for. Call in a thread."""
    wanted = plan(snapshot, request)
    return Bringing(
        request.dataset, _blocks(snapshot, wanted.files), wanted.blocks, wanted.bytes,
        len(wanted.missing), next(iter(wanted.missing), ""), snapshot.id,
    )  # fmt: skip


def _batches(run: Run) -> Iterator[list[tuple[BlockRef, int]]]:
    while batch := list(itertools.islice(run.wanted.refs, BATCH)):
        yield batch


def _blocks(snapshot: Snapshot, files: "array[int]") -> Iterator[tuple[BlockRef, int]]:
    for file in files:
        size, _ = snapshot.file(file)
        for number in range(block_count(size, snapshot.block_size)):
            ref = BlockRef(snapshot=snapshot.id, entry=file, number=number)
            yield ref, block_length(size, snapshot.block_size, number)
