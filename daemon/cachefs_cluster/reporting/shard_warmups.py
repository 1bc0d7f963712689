"""Warm-ups that schedulers request: of a dataset or of some of its shards, before a job begins there."""

import logging
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.errors import Busy, ConfigError
from cachefs.observe_messages import CommandedWarmup, NodeCommand, NodeCommandResult
from cachefs.planning.blocks.presence import SHARDS, shards_of_blocks
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import UNKNOWN_READ
from cachefs.snapshot import Snapshot
from cachefs_daemon.content.warmup import WarmupBlocks, WarmupRun, Warmups, WarmupState, block_refs
from cachefs_daemon.jobs.owners import name_without_owner
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Most warm-ups of all schedulers that run at once, and most that are kept, including ended ones.
MAX_RUNNING: Final = 32
MAX_KNOWN: Final = 128


class ShardWarmups:
    """Runs warm-ups for schedulers, each under the id of its command. Used on the event loop."""

    def __init__(self, warmups: Warmups, plan: Plan, jobs: JobRegistry, threads: Threads) -> None:
        self._warmups = warmups
        self._plan = plan
        self._jobs = jobs
        self._threads = threads
        self._runs: dict[str, WarmupRun | None] = {}  # by id of the command; None: in preparation

    @property
    def is_busy(self) -> bool:
        """Whether a warm-up is in progress."""
        return any(run is None or not run.task.done() for run in self._runs.values())

    async def begin(self, command: NodeCommand, snapshot: Snapshot) -> NodeCommandResult:
        """Begin a warm-up, unless one with that id is known. Raises ConfigError, Busy."""
        if not command.id or len(command.shards) not in (0, SHARDS // 8):
            raise ConfigError(f"a warm-up has an id, and no shards (all) or {SHARDS // 8} bytes of them")
        if command.id in self._runs:
            known = self._runs[command.id]
            return (
                NodeCommandResult(known.blocks_to_fetch.blocks, known.blocks_to_fetch.bytes)
                if known is not None
                else NodeCommandResult()
            )
        running = sum(1 for run in self._runs.values() if run is None or not run.task.done())
        if running >= MAX_RUNNING:
            raise Busy(f"{running} warm-ups commanded by schedulers run on this node already; try again later")
        self._forget_old_runs()
        self._runs[command.id] = None
        try:
            warmup = await self._threads.planning(self._blocks_to_fetch, command, snapshot)
        except BaseException:
            del self._runs[command.id]
            raise
        if command.id not in self._runs:  # stopped meanwhile
            return NodeCommandResult()
        self._runs[command.id] = self._warmups.start_fetching(warmup)
        return NodeCommandResult(warmup.blocks, warmup.bytes)

    def stop(self, order: str) -> None:
        """End a warm-up; ignore one that has ended, or is unknown."""
        run = self._runs.get(order)
        if run is not None:
            run.task.cancel()
        elif order in self._runs:
            del self._runs[order]

    def reports(self) -> list[CommandedWarmup]:
        """Return the progress of recent warm-ups."""
        return [_report(name, run) for name, run in self._runs.items()]

    def _forget_old_runs(self) -> None:
        ended = [name for name, run in self._runs.items() if run is not None and run.task.done()]
        for name in ended[: max(0, len(self._runs) - MAX_KNOWN + 1)]:
            del self._runs[name]

    def _blocks_to_fetch(self, command: NodeCommand, snapshot: Snapshot) -> WarmupBlocks:
        space = self._plan.spaces.get(snapshot.id) or BlockSpace.of(snapshot)
        numbers = np.arange(space.count, dtype=np.int64)
        if command.shards:
            marked = np.unpackbits(np.frombuffer(command.shards, np.uint8), bitorder="little").astype(np.bool_)
            numbers = numbers[marked[shards_of_blocks(numbers, space.count)]]
        first = self._first_reads(command.job, snapshot.id)
        if first is not None and len(first) == space.count:
            numbers = numbers[np.argsort(first[numbers], kind="stable")]
        size = int(space.sizes[numbers].sum(dtype=np.int64))
        return WarmupBlocks(command.dataset, block_refs(space, numbers), len(numbers), size, snapshot=space.snapshot)

    def _first_reads(self, job: str, snapshot: str) -> npt.NDArray[np.uint32] | None:
        """Return the position of each block's first read by a consumer of the job here, or None."""
        for consumer in self._jobs.consumers if job else ():
            if consumer.snapshot.id == snapshot and job in (
                consumer.request.job,
                name_without_owner(consumer.request.job),
            ):
                if not self._plan.has_consumer(consumer.key):
                    continue
                epoch = self._plan.epoch(consumer.key, self._plan.progress(consumer.key)[0])
                if epoch is not None:
                    # UNKNOWN_READ goes last.
                    return np.where(epoch.first == UNKNOWN_READ, np.iinfo(np.uint32).max, epoch.first).astype(np.uint32)
        return None


def _report(name: str, run: WarmupRun | None) -> CommandedWarmup:
    if run is None:
        return CommandedWarmup(name, WarmupState.RUNNING, 0, 0, 0)
    return CommandedWarmup(
        name, run.state, run.blocks, run.blocks_to_fetch.blocks, run.bytes, run.skipped, run.failed, run.message[:200]
    )
