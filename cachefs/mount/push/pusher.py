"""The pusher: subscribes to the daemon's commands, has threads execute them, reports, and resubscribes.

Pages outlive the daemon, so nothing is dropped when the daemon ends: the next daemon gets the list of pushed pages, and
continues from there.

The budget of pushed pages is a share of the memory available when the mount starts. It is reduced so that a tenth of
the machine's (or the control group's) memory stays available for others. Pushed pages count as available memory, since
the kernel can reclaim them at once; filling the budget therefore does not lower it.
"""

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cachefs.cgroup import memory_limits
from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import DatasetView, Empty, NodeView
from cachefs.mount.device import FuseConnection
from cachefs.mount.node_view import TierView
from cachefs.mount.push import blocks
from cachefs.mount.push.blocks import BlockMover, StoreUnsupported, TierSource
from cachefs.mount.push.command_tracker import CommandTracker
from cachefs.mount.push.mounted_snapshots import MountedSnapshots
from cachefs.mount.push.push_threads import PushTask, PushThreads, split_task
from cachefs.mount.reads.read_records import ReadMarks
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import mount_points
from cachefs.push_messages import PushCommand, PushReport, PushResult, PushSubscription, StoredPages
from cachefs.rpc import NODE, PUSH, PUSH_REPORT, DaemonClient
from cachefs.sizes import SizeSetting, format_size

_OTHERS_DIVISOR: Final = 10  # 1/10 of all memory
# The budget regrows by 1/50 of its largest size per second: memory that has just become free is often taken again.
_GROWTH_DIVISOR: Final = 50
log = logging.getLogger(__name__)

_CALL_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_BUDGET_SECONDS: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
# Where readers leave no processor idle, a file that is pushed in time costs 100 us of a processor, and a file that a
# reader finds missing 160 us. With two readers at full speed on two processors, 60 % of the files were pushed in time
# without a raised priority, and 85 % with it.
_NICENESS: Final = -5


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Total and available memory of a machine or of a control group, in bytes."""

    total: int
    available: int


def read_memory(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> list[MemoryState]:
    """Return the memory of this machine, and of each of its control groups with a limit. Raises OSError, ValueError."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    groups = [MemoryState(limit, limit - used) for limit, used in memory_limits(proc, sys) if limit < total]
    return [MemoryState(total, available), *groups]


class PageCacheBudget:
    """The budget of one mount."""

    def __init__(self, share: SizeSetting, found: Sequence[MemoryState]) -> None:
        self.max_bytes = share.resolve(max(0, min(one.available for one in found)))  # bytes, while memory is not short
        self.current_bytes = min(self.max_bytes, _spare_bytes(found))  # current bytes

    def update_budget(self, found: Sequence[MemoryState]) -> None:
        """Adapt the budget to the memory *found*. To be called once a second."""
        self.current_bytes = min(
            self.max_bytes, self.current_bytes + self.max_bytes // _GROWTH_DIVISOR, _spare_bytes(found)
        )


def _spare_bytes(found: Sequence[MemoryState]) -> int:
    return max(0, min(one.available - one.total // _OTHERS_DIVISOR for one in found))


@dataclass(frozen=True, slots=True)
class PusherSettings:
    """The settings of a pusher."""

    # Descriptor of the pusher's own on the mount's FUSE connection.
    device: int
    # Descriptor of the marks of blocks read by workers (cachefs.mount.reads.read_records).
    marks: int
    # The mounted datasets.
    spec: MountSpec
    # The mount point.
    directory: Path
    # The mount's id in its reports.
    mount: str
    # Path of the daemon's socket.
    socket: Path
    # Most memory of pushed pages: bytes, or a share of the memory.
    share: SizeSetting
    # Number of threads that store and drop pages.
    threads: int
    # False where the pusher only tests which pages are cached.
    can_push: bool = True


class Pusher:
    """One thread follows the daemon's orders, one reports, and `settings.threads` further threads store and drop."""

    def __init__(self, settings: PusherSettings) -> None:
        self._settings = settings
        self._client = DaemonClient(settings.socket)
        self._budget = PageCacheBudget(settings.share, read_memory())
        self._commands = CommandTracker()
        self._mounted_snapshots = MountedSnapshots(settings.spec, settings.directory, self._datasets)
        self._tiers: TierView | None = None
        shielded = any(one.path == settings.directory and one.shielded_connection is not None for one in mount_points())
        self._movers = [
            BlockMover(settings.device, ReadMarks(settings.marks), look_up=shielded) for _ in range(settings.threads)
        ]
        self._can_push = settings.can_push  # False: pages are only tested, not stored or dropped

    def run(self) -> None:
        """Push until the mount has ended."""
        if self._can_push:
            log.info("page cache budget of %s: %s", self._settings.directory, format_size(self._budget.current_bytes))
        self._workers = PushThreads(
            self._movers, self._commands.finish_part, self._stop_storing, lambda: self._can_push
        )
        for work in (self._follow_commands, self._report_finished):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        while not blocks.has_mount_ended(self._settings.device, _BUDGET_SECONDS):
            self._budget.update_budget(read_memory())

    def _stop_storing(self, reason: StoreUnsupported) -> None:
        """Stop storing pages, and only test for them. The next subscription tells the daemon."""
        if self._can_push:
            self._can_push = False
            log.warning("this kernel takes no pages of %s ahead of reads (%s)", self._settings.directory, reason)

    @property
    def _storable_bytes(self) -> int:
        """Bytes of pages that may be stored at present."""
        return self._budget.current_bytes if self._can_push else 0

    # --- orders: one thread ---------------------------------------------------------------------------------------

    def _follow_commands(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                stored = self._commands.begin_subscription()
                self._use_current_tiers()
                request = self._subscription(stored)
                for order in self._client.stream_responses(PUSH, request):
                    pause = _FIRST_PAUSE
                    self._execute_command(order)
                    if request.pushes != self._can_push:
                        break
            except DaemonUnavailable as error:
                log.debug("%s", error)
            except CachefsError as error:
                log.log(logging.WARNING if pause == _FIRST_PAUSE else logging.DEBUG, "no orders: %s", error)
            except ImportError as error:  # numpy was taken away or replaced since the mount began
                log.warning(
                    "%s gets no more pages ahead of reads, as numpy cannot be imported (%s): mount again",
                    self._settings.directory, error,
                )  # fmt: skip
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _use_current_tiers(self) -> None:
        """Read blocks from the tiers of the current daemon. No order is in progress, so no thread uses the index."""
        view = self._client.call(NODE, Empty(), timeout=_CALL_SECONDS)
        if self._tiers is None:
            self._tiers = TierView(view)
        else:
            self._tiers.adopt_view(view)
        self._workers.use_source(TierSource(self._tiers.index, self._tiers.directories))

    def _subscription(self, stored: list[StoredPages]) -> PushSubscription:
        return PushSubscription(
            mount=self._settings.mount, budget=self._storable_bytes, held=stored, counters=self._counters(),
            pushes=self._can_push, directory=str(self._settings.directory),
        )  # fmt: skip

    def _datasets(self) -> Sequence[DatasetView]:
        view: NodeView = self._client.call(NODE, Empty(), timeout=_CALL_SECONDS)
        return view.datasets

    def _execute_command(self, order: PushCommand) -> None:
        if not order.entries:
            return
        import numpy as np

        entries = np.frombuffer(order.entries, "<u8")
        numbers = np.frombuffer(order.numbers, "<u4")
        mounted = self._mounted_snapshots.find_snapshot(order.snapshot)
        if mounted is None:
            log.debug("snapshot %s is not shown by %s", order.snapshot, self._settings.directory)
            self._commands.refuse_command(order.serial, len(entries))
            return
        task = PushTask(order.serial, mounted, order.drop, np.arange(len(entries)), entries, numbers, order.check)
        parts = split_task(task, len(self._movers))
        self._commands.begin_command(task, len(parts))
        self._workers.submit_tasks(parts)

    # --- reports: another -----------------------------------------------------------------------------------------

    def _report_finished(self) -> None:
        reported = self._storable_bytes
        while True:
            subscription, done = self._commands.take_finished(_BUDGET_SECONDS)
            if done or reported != self._storable_bytes:
                reported = self._storable_bytes
                self._send_report(done, subscription)

    def _send_report(self, done: list[PushResult], subscription: int) -> None:
        """Report until the daemon has the report, since it holds back orders until then. A restarted daemon does not
        know these orders, and does not get the report."""
        while subscription == self._commands.subscription:
            report = PushReport(
                mount=self._settings.mount, done=done, budget=self._storable_bytes, counters=self._counters()
            )
            try:
                self._client.call(PUSH_REPORT, report, timeout=_CALL_SECONDS)
                return
            except CachefsError as error:
                log.debug("no report: %s", error)
                if not done:
                    return
                time.sleep(_FIRST_PAUSE)

    def _counters(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for mover in self._movers:
            for name, value in asdict(mover.counters).items():
                totals[name] = totals.get(name, 0) + value
        return totals


def run_pusher(settings: PusherSettings, connection: FuseConnection, parent: int) -> None:
    """Push until the mount has ended; to be called in a separate process.

    connection: the mount's; it is ended, with this process, when process *parent*, the supervisor, has died.
    """
    _end_with_parent(parent, connection, settings.device)
    threading.excepthook = _exit_on_failure
    with contextlib.suppress(PermissionError):  # in the mount of an ordinary user
        os.nice(_NICENESS)
    Pusher(settings).run()


def _end_with_parent(parent: int, connection: FuseConnection, device: int) -> None:
    """Have the mount's connection, and this process, end when *parent* has died.

    A kill would not suffice. A thread of this process may wait for a page that a reader has locked, and whose request
    no worker has taken yet. The thread cannot die before that request is answered; and as long as the thread lives this
    process holds the device, so the kernel goes on waiting for an answer.
    """
    # After the end of this mount, another mount on the directory may have been given the same number.
    is_ours = not blocks.has_mount_ended(device, 0)

    def follow(*_: object) -> None:
        if os.getppid() != parent:
            if is_ours:
                connection.abort()
            os._exit(1)

    # This signal also reaches a stopped process; all processes of the mount may have been stopped.
    signal.signal(signal.SIGCONT, follow)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    follow()


def _exit_on_failure(failure: threading.ExceptHookArgs) -> None:
    """End the process where a thread fails, as its orders would never finish. The supervisor starts another pusher."""
    log.critical("a thread of the pusher failed", exc_info=failure.exc_value)
    logging.shutdown()
    os._exit(1)
