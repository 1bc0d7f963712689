"""The stream of commands to one mount's pusher: turns decisions of the push plan into messages, and processes
replies."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Final

import numpy as np

from cachefs.planning.pagecache.push_plan import (
    NO_CONSUMERS,
    FileBlocks,
    MountConsumers,
    PageAction,
    PageCommand,
    PushPlan,
)
from cachefs.planning.pagecache.states import PageStates
from cachefs.push_messages import PushCommand, PushReport, PushSubscription, StoredPages

# Longest step between two questions to the plan; MIN_STEP_SECONDS is the shortest. One takes 0.3 ms beside readers at
# full speed, and a pusher has commands for longer than the shortest step.
STEP_SECONDS: Final = 0.05
# The step where nothing is to be pushed. A published job and further reads wake the stream at once.
IDLE_SECONDS: Final = 0.5
MIN_STEP_SECONDS: Final = 0.01
# A pusher without a command for this long gets an empty one, as a heartbeat of the daemon.
ALIVE_SECONDS: Final = 10.0


class PushStream:
    """The stream of one mount, whichever process pushes for it: the mount's pages outlive that process."""

    def __init__(self, plan: PushPlan, audience: Callable[[float], MountConsumers], lead: Callable[[], float]) -> None:
        """plan: decides the commands; audience: returns the readers of what the mount shows, where a command takes the
        given seconds; lead: returns the seconds before its read that a block must be fetched."""
        self.pages = plan.pages  # the model of the mount's page cache
        self.is_listening = False  # a pusher takes commands
        self.pushes = True  # and does not only report which pages are there
        self.readahead_blocks = 0  # blocks to be pushed because of readahead
        self._plan = plan
        self._audience = audience
        self._lead = lead
        self._subscription = 0  # number of the latest one; earlier ones have ended
        self._closed = False
        self._counters: Counter[str] = Counter()  # as the present pusher last reported them
        self._ended_counters: Counter[str] = Counter()  # counters of pushers that have ended
        self._counters_before_start: Counter[str] = Counter()  # counted before the first subscription to this daemon
        self._wakeup = asyncio.Event()

    @property
    def can_push(self) -> bool:
        """Whether there is a pusher that may push."""
        return self.is_listening and self.pages.budget > 0

    @property
    def states(self) -> PageStates:
        """The states of `pages`, without those of snapshots that are read only through other mounts."""
        return self._plan.states

    @property
    def pushed_bytes(self) -> Mapping[str, int]:
        """Bytes that this daemon has pushed for reads of jobs, by snapshot."""
        return self._plan.stored_bytes

    @property
    def counters(self) -> dict[str, int]:
        """The counters of all pushers of the mount, since the first of them began."""
        return {name: self._ended_counters[name] + value for name, value in self._counters.items()}

    @property
    def counters_since_start(self) -> dict[str, int]:
        """The counters of `counters`, since this daemon started."""
        return {name: value - self._counters_before_start[name] for name, value in self.counters.items()}

    async def commands(self, request: PushSubscription) -> AsyncGenerator[PushCommand, None]:
        """Yield the commands for the pusher that sends *request*, as they are decided. They end when the pusher listens
        no longer, or when another pusher of the mount subscribes."""
        files = [_file_blocks(one) for one in request.held]
        self._plan.start_pusher(request.budget, files, asyncio.get_running_loop().time(), pushes=request.pushes)
        self.is_listening, self.pushes = True, request.pushes
        if not self._subscription:
            self._counters_before_start = Counter(request.counters)
        self._subscription += 1
        self._wakeup.set()  # commands to an earlier pusher end
        subscription = self._subscription
        try:
            async for order in self._commands_of(subscription):
                yield order
        finally:
            if subscription == self._subscription or self._closed:
                self.is_listening = False

    async def _commands_of(self, subscription: int) -> AsyncGenerator[PushCommand, None]:
        now = asyncio.get_running_loop().time
        last_command_at = now()
        while subscription == self._subscription:
            self._wakeup.clear()
            for order in self._next_commands(now()):
                last_command_at = now()
                yield _encode_command(order)
                if subscription != self._subscription:
                    return
            if now() - last_command_at > ALIVE_SECONDS:
                last_command_at = now()
                yield PushCommand(serial=0, snapshot="", entries=b"", numbers=b"")
            await asyncio.sleep(MIN_STEP_SECONDS)
            if not self._wakeup.is_set():  # a timeout takes longer than a check
                step = IDLE_SECONDS if self._plan.is_idle else STEP_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(step - MIN_STEP_SECONDS):
                        await self._wakeup.wait()

    def _next_commands(self, now: float) -> Iterator[PageCommand]:
        audience = self._audience(self._plan.latency) if self._plan.needs_consumers else NO_CONSUMERS
        return self._plan.next_commands(audience, now, self._lead())

    def close(self) -> None:
        """End the stream: the pusher subscribes again, to the next daemon."""
        self._closed = True
        self._subscription += 1
        self._wakeup.set()

    def wake(self) -> None:
        """Wake the stream after further reads."""
        self._wakeup.set()

    def push_readahead(self, files: FileBlocks, size: int) -> None:
        """Push these blocks, of *size* bytes, which are probably read next, although no published sequence has them."""
        if self.can_push:
            self.readahead_blocks += len(files)
            self._plan.queue_readahead(files, size)
            self._wakeup.set()

    def handle_report(self, report: PushReport) -> None:
        """Process the results of commands. The plan has forgotten those of an earlier subscription."""
        self.pages.set_budget(report.budget)
        if any(report.counters.get(name, 0) < value for name, value in self._counters.items()):
            self._ended_counters.update(self._counters)  # the report is from another process
        self._counters = Counter(report.counters)
        now = asyncio.get_running_loop().time()
        for done in report.done:
            self._plan.note_done(done.serial, np.frombuffer(done.failed, "<u4"), now)
        self._wakeup.set()


def _encode_command(order: PageCommand) -> PushCommand:
    return PushCommand(
        serial=order.serial,
        snapshot=order.files.snapshot,
        entries=order.files.entries.astype("<u8").tobytes(),
        numbers=order.files.numbers.astype("<u4").tobytes(),
        drop=order.action is PageAction.DROP,
        check=order.action is PageAction.CHECK,
    )


def _file_blocks(pages: StoredPages) -> FileBlocks:
    entries, numbers = np.frombuffer(pages.entries, "<u8"), np.frombuffer(pages.numbers, "<u4")
    return FileBlocks(pages.snapshot, entries.astype(np.int64), numbers.astype(np.int64))
