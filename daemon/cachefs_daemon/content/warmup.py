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
from cachefs.messages import BlockRef, WarmupProgress, WarmupRequest
from cachefs.planning.blocks.space import BlockSpace, Numbers
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets import selection
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Workers of one warmup, and blocks that each requests at once. Together they request twice the default of
# origin.max_connections, so that no connection idles behind a slow block. Twice as many workers or blocks made no
# warmup faster, but every other fetch slower.
WORKERS: Final = 8
BLOCKS_PER_REQUEST: Final = 16
REPORT_SECONDS: Final = 0.2
# Blocks for which references are created at once.
_REFS_AT_ONCE: Final = 4096
# Ended warmups that are still listed.
MAX_ENDED: Final = 20


class WarmupState(StrEnum):
    """State of a warmup, as reported in WarmupProgress."""

    # Only a warmup of the cluster waits: for its time, or for a job.
    WAITING = "waiting"
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
class WarmupBlocks:
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
class WarmupRun:
    """One warmup and its progress."""

    id: int
    blocks_to_fetch: WarmupBlocks
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
    request: WarmupRequest | None = None
    task: "asyncio.Task[None]" = field(init=False)

    def progress(self) -> WarmupProgress:
        return WarmupProgress(
            id=self.id,
            state=self.state,
            blocks=self.blocks,
            blocks_total=self.blocks_to_fetch.blocks,
            bytes=self.bytes,
            bytes_total=self.blocks_to_fetch.bytes,
            skipped=self.skipped,
            failed=self.failed,
            message=self.message,
            dataset=self.blocks_to_fetch.dataset,
            missing=self.blocks_to_fetch.missing,
            first_missing=self.blocks_to_fetch.first_missing,
        )


class Warmups:
    """Running warmups, and the last ended ones. Used on the event loop."""

    def __init__(self, fetcher: Fetcher, threads: Threads) -> None:
        self._fetcher = fetcher
        self._threads = threads
        self._numbers = itertools.count(1)
        self._running: dict[int, WarmupRun] = {}  # by id
        self._ended: deque[WarmupRun] = deque(maxlen=MAX_ENDED)
        # `background_requests` has changed since it was saved.
        self._has_unsaved = False

    def __len__(self) -> int:
        return len(self._running)

    def mark_unsaved(self) -> None:
        """Have the state saved again."""
        self._has_unsaved = True

    def take_unsaved(self) -> bool:
        """Return whether the state has changed since the last call: it is then to be saved."""
        unsaved, self._has_unsaved = self._has_unsaved, False
        return unsaved

    def __iter__(self) -> Iterator[WarmupRun]:
        """Iterate over warmups, oldest first."""
        return iter(sorted([*self._ended, *self._running.values()], key=lambda run: run.id))

    def read_snapshots(self) -> set[tuple[str, str]]:
        """Return datasets and snapshots of the running warmups."""
        return {(run.blocks_to_fetch.dataset, run.blocks_to_fetch.snapshot) for run in self._running.values()}

    def background_requests(self) -> list[WarmupRequest]:
        """Return the requests to continue after a restart."""
        return [run.request for run in self._running.values() if run.request is not None]

    async def run(self, snapshot: Snapshot, request: WarmupRequest) -> AsyncGenerator[WarmupProgress, None]:
        """Start a warmup. Yields progress until its end, or a single message if the request says not to wait.

        If a waiting caller goes away, the warmup ends. Raises NotFound, ConfigError.
        """
        run = await self.start(snapshot, request)
        if not request.wait:
            yield run.progress()
            return
        try:
            async for progress in _progress_until_end(run):
                yield progress
        finally:
            run.task.cancel()

    async def start(self, snapshot: Snapshot, request: WarmupRequest) -> WarmupRun:
        """Start a warmup. Without a waiting caller, it continues after a restart. Raises NotFound, ConfigError."""
        run = self.start_fetching(await self._threads.background(_blocks_of_request, snapshot, request))
        if not request.wait:
            run.request = request
            self._has_unsaved = True
        return run

    async def watch(self, number: int) -> AsyncGenerator[WarmupProgress, None]:
        """Yield the progress of a warmup until its end, which does not depend on the caller. Raises NotFound."""
        async for progress in _progress_until_end(self._run_of(number)):
            yield progress

    async def cancel(self, number: int) -> WarmupProgress:
        """Cancel a warmup; fetched blocks stay. Raises NotFound."""
        run = self._run_of(number)
        run.task.cancel()
        await asyncio.wait([run.task])
        return run.progress()

    def _run_of(self, number: int) -> WarmupRun:
        run = next((run for run in self if run.id == number), None)
        if run is None:
            raise NotFound(f"there is no warmup {number}; `cachectl warmups` shows the existing ones")
        return run

    def start_fetching(self, blocks: WarmupBlocks, number: int = 0) -> WarmupRun:
        """Start to fetch blocks in order. Cancel the task of the returned Run to end it. number: its id; 0: the
        next."""
        run = WarmupRun(number or next(self._numbers), blocks)
        run.task = asyncio.create_task(self._run_workers(run))
        self._running[run.id] = run
        return run

    async def close(self) -> None:
        """Cancel all warmups."""
        tasks = [run.task for run in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_workers(self, run: WarmupRun) -> None:
        batches = _batches(run)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._fetch_batches(run, batches))
            run.state = WarmupState.FAILED if run.failed else WarmupState.DONE
        except asyncio.CancelledError:
            run.state = WarmupState.CANCELLED
            raise
        except Exception as error:
            log.exception("warmup %d of %s failed unexpectedly", run.id, run.blocks_to_fetch.dataset)
            run.state, run.message = WarmupState.FAILED, f"internal error ({error!r}); see the daemon's log"
        finally:
            # A warmup of the cluster has one number for all runs of this node's part.
            if self._running.get(run.id) is run:
                del self._running[run.id]
            self._ended = deque((one for one in self._ended if one.id != run.id), MAX_ENDED)
            self._ended.append(run)
            self._has_unsaved = self._has_unsaved or run.request is not None
            run.request = None
            # The Run of a cancelled warmup stays referenced, and its list of blocks may take 100 MB.
            run.blocks_to_fetch = replace(run.blocks_to_fetch, refs=iter(()))
            log.info(
                "warmup %d of %s %s: %d of %d blocks here, %d not admitted, %d failed",
                run.id, run.blocks_to_fetch.dataset, run.state, run.blocks, run.blocks_to_fetch.blocks, run.skipped,
                run.failed,
            )  # fmt: skip

    async def _fetch_batches(self, run: WarmupRun, batches: Iterator[list[tuple[BlockRef, int]]]) -> None:
        for batch in batches:
            outcomes = await self._fetcher.fetch_ahead([ref for ref, _ in batch])
            for (_, length), outcome in zip(batch, outcomes, strict=True):
                if outcome is None:
                    run.skipped += 1
                elif isinstance(outcome, CachefsError):
                    run.failed += 1
                    run.message = str(outcome)
                else:
                    run.blocks += 1
                    run.bytes += length


async def _progress_until_end(run: WarmupRun) -> AsyncGenerator[WarmupProgress, None]:
    while not run.task.done():
        yield run.progress()
        await asyncio.wait([run.task], timeout=REPORT_SECONDS)
    yield run.progress()


def plan_warmup(snapshot: Snapshot, request: WarmupRequest) -> WarmupPlan:
    """Return the plan of a request. Call in a thread. Takes 8 bytes per file: 8 MB for a million files.

    Raises NotFound, ConfigError.
    """
    if not 0 < request.fraction <= 1:
        raise ConfigError(f"fraction {request.fraction:g}: expected more than 0 and at most 1")
    numbers = array("Q")
    sizes = array("Q")
    tops, missing = selection.split_existing(snapshot, request.paths)
    if missing and not (tops and request.leave_out_missing):
        raise selection.not_in_snapshot_error(snapshot, missing)
    for entry in selection.walk(snapshot, tops):
        numbers.append(entry.number)
        sizes.append(entry.size)
    count = math.ceil(len(numbers) * request.fraction)
    blocks = sum(block_count(size, snapshot.block_size) for size in sizes[:count])
    return WarmupPlan(
        numbers[:count], blocks, sum(sizes[:count]), [path.decode(errors="backslashreplace") for path in missing]
    )


def _blocks_of_request(snapshot: Snapshot, request: WarmupRequest) -> WarmupBlocks:
    """Return the blocks that a request asks for. Call in a thread."""
    plan = plan_warmup(snapshot, request)
    return WarmupBlocks(
        request.dataset, _blocks(snapshot, plan.files), plan.blocks, plan.bytes,
        len(plan.missing), next(iter(plan.missing), ""), snapshot.id,
    )  # fmt: skip


def _batches(run: WarmupRun) -> Iterator[list[tuple[BlockRef, int]]]:
    while batch := list(itertools.islice(run.blocks_to_fetch.refs, BLOCKS_PER_REQUEST)):
        yield batch


def _blocks(snapshot: Snapshot, files: "array[int]") -> Iterator[tuple[BlockRef, int]]:
    for file in files:
        size, _ = snapshot.size_and_content(file)
        for number in range(block_count(size, snapshot.block_size)):
            ref = BlockRef(snapshot=snapshot.id, entry=file, number=number)
            yield ref, block_length(size, snapshot.block_size, number)


def block_refs(space: BlockSpace, numbers: Numbers) -> Iterator[tuple[BlockRef, int]]:
    """Yield blocks of a space, in the order of *numbers* (shape (n,)), with their lengths in bytes."""
    for start in range(0, len(numbers), _REFS_AT_ONCE):
        some = numbers[start : start + _REFS_AT_ONCE]
        entries, parts = space.refs(some)
        for entry, part, size in zip(entries.tolist(), parts.tolist(), space.sizes[some].tolist(), strict=True):
            yield BlockRef(snapshot=space.snapshot, entry=entry, number=part), size
