"""A worker of a mount: answers requests of the kernel, and reports to the daemon, until the mount ends.

A worker is forked from the supervisor after the kernel's INIT was answered, with libfuse's session; a clone of the
device replaces the session's own descriptor. No state is kept between requests, so any worker can answer any request.

Its messages to the supervisor are one packet of a socket each.
"""

import errno
import functools
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import grpc
import pyfuse3
import trio

from cachefs import __version__
from cachefs.errors import CachefsError
from cachefs.messages import MIN_REPORT_SECONDS, MountReport, NodeView
from cachefs.mount.control.control_directory import ControlDirectory
from cachefs.mount.daemon_link import DaemonLink
from cachefs.mount.namespace import Namespace
from cachefs.mount.node_view import LoggedView, ViewLog
from cachefs.mount.options import MountOptions
from cachefs.mount.reads.block_reader import MAX_WAITING, BlockReader
from cachefs.mount.reads.fetch_channel import FetchChannelClient
from cachefs.mount.reads.operations import Operations
from cachefs.mount.reads.read_records import ReaderTable, ReadMarks
from cachefs.mount_spec import MountSpec
from cachefs.read_messages import MountReadReport
from cachefs.rpc import REPORT, TELL_READS, DaemonClient

log = logging.getLogger(__name__)

# The daemon's next fetches and evictions depend on the reads. While there is something to report, a report is therefore
# sent at least this often, and sooner after many reads (BlockReader.report_due). Each takes 0.5 ms of the worker.
REPORT_SECONDS: Final = 0.1
# Seconds between reports of an idle mount, as signs of life.
IDLE_REPORT_SECONDS: Final = 10.0
REPORT_TIMEOUT: Final = 5.0
HEARTBEAT_SECONDS: Final = 1.0
# Requests that a worker handles at once: MAX_WAITING reads may wait, and others must still be answered. pyfuse3 starts
# a task for each request when no task is idle.
MAX_REQUESTS: Final = MAX_WAITING + 1000


class WorkerMessage(StrEnum):
    # The worker answers requests.
    READY = "ready"
    # A heartbeat of the loop that answers requests, sent every second.
    HEARTBEAT = "beat"
    # The mount has ended.
    ENDED = "over"
    # The worker cannot serve, for the reason given.
    FAILED = "failed"


def pack(message: WorkerMessage, reason: str = "") -> bytes:
    return f"{message} {reason}".encode()


def unpack(packet: bytes) -> tuple[WorkerMessage, str]:
    """Return the message, and the reason given."""
    message, _, reason = packet.decode().partition(" ")
    return WorkerMessage(message), reason


@dataclass(frozen=True, slots=True)
class MountState:
    """The state shared by the processes of one mount."""

    # Names the mount in reports to the daemon.
    id: str
    # Process number of the supervisor.
    pid: int
    spec: MountSpec
    directory: Path
    options: MountOptions
    views: ViewLog
    # An eventfd, set when a program is about to write to the control FIFO (cachefs.mount.control.control_directory).
    control_wakeup: int
    # Descriptors of marks (cachefs.mount.reads.read_records): of blocks read, and of blocks whose fetch failed at a
    # deadline.
    read_marks: int
    failure_marks: int
    # Descriptor of the table of processes that have read the mount (cachefs.mount.reads.read_records).
    reader_table: int
    # An eventfd, set once a signal has asked for the end of the mount.
    end_request: int

    @property
    def is_ending(self) -> bool:
        poll = select.poll()
        poll.register(self.end_request, select.POLLIN)
        return bool(poll.poll(0))


def run_worker(
    mount: MountState, number: int, operations: Operations, connection: int, supervisor: socket.socket, *, begins: bool
) -> None:
    """Run worker *number*, in a process of its own, until the mount ends.


    connection: the kernel's number of the FUSE connection; supervisor: the socket for messages to it; begins: whether
    this is the first worker to serve the mount.
    """
    logging.getLogger("pyfuse3").addFilter(_is_worth_logging)
    try:
        trio.run(functools.partial(Worker(mount, number, operations, connection, supervisor).run, begins=begins))
    except (CachefsError, OSError) as error:
        supervisor.send(pack(WorkerMessage.FAILED, str(error)))


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for the log record of an answer that the kernel refused as already given: after a worker's death,
    its requests are handed out again."""
    return "fuse_reply" not in record.msg or record.args != (os.strerror(errno.ENOENT),)


class Worker:
    """Serves a mount in one process. Creates all parts that serving needs.

    To be created after the fork, which gRPC, LMDB and trio do not survive.
    """

    def __init__(
        self, mount: MountState, number: int, operations: Operations, connection: int, supervisor: socket.socket
    ) -> None:
        self._mount = mount
        self._number = number
        self._operations = operations
        self._connection = connection
        self._supervisor = supervisor
        self._counters = operations.counters
        operations.record_reader = ReaderTable(mount.reader_table, mount.pid).record_reader
        self._client = DaemonClient(mount.options.socket)
        first, *later = mount.views.read_new()
        self._last_view = first  # the last view of the node that this worker has adopted
        self._namespace = Namespace(
            mount.spec, first.view.datasets, lambda: self._last_view.when_ns, self._adopt_logged_views
        )
        self._adopt_views(later)
        self._has_end_signal = False
        self._daemon_instance = ""  # instance of the daemon that answered the last report
        self._logged_trouble = ""  # the last logged reason why a view could not be followed

    async def run(self, *, begins: bool) -> None:
        """Serve until the mount ends. Raises CachefsError where serving cannot begin.

        A mount cannot begin without the node's index. Later, a worker serves also while the index cannot be opened, as
        when the daemon is away and rebuilds it: the worker requests each block from the daemon, and readers wait.
        """
        link = DaemonLink(self._client)
        channel = FetchChannelClient(self._mount.options.socket)
        marks, failures = ReadMarks(self._mount.read_marks), ReadMarks(self._mount.failure_marks)
        self._reader = BlockReader(channel, self._last_view.view, self._counters, marks, failures, needs_index=begins)
        control = ControlDirectory(self._namespace, self._mount.control_wakeup)
        self._operations.attach(self._namespace, control, self._reader)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_on_signal)
                nursery.start_soon(self._send_heartbeats)
                nursery.start_soon(self._wake_at_end_request)
                nursery.start_soon(self._send_reports, link)
                nursery.start_soon(self._send_reads, link)
                nursery.start_soon(channel.run)
                nursery.start_soon(self._announce_ready)
                await pyfuse3.main(max_tasks=MAX_REQUESTS)
                if not self._has_end_signal:
                    self._send_message(WorkerMessage.ENDED)
                nursery.cancel_scope.cancel()
        finally:
            self._report_closing()

    async def _announce_ready(self) -> None:
        """Tell the supervisor that requests are answered, after a stat through the mount has proved it. Another, stuck
        worker may have taken the stat, so a slow stat is no reason to end."""
        await trio.to_thread.run_sync(os.stat, self._mount.directory, abandon_on_cancel=True)
        self._send_message(WorkerMessage.READY)

    async def _end_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                self._has_end_signal = True
                pyfuse3.terminate()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats from the loop that answers requests. When the loop is stuck, they stop, and the supervisor
        notices."""
        while True:
            self._send_message(WorkerMessage.HEARTBEAT)
            self._adopt_logged_views()
            if not self._reader.has_index:
                self._try_to_follow(lambda: self._reader.adopt_view(self._last_view.view))
            self._namespace.close_idle()
            await trio.sleep(HEARTBEAT_SECONDS)

    def _send_message(self, message: WorkerMessage) -> None:
        try:
            self._supervisor.send(pack(message), socket.MSG_DONTWAIT)
        except OSError as error:
            log.debug("the supervisor does not listen: %s", error)

    async def _send_reports(self, link: DaemonLink) -> None:
        reader = self._reader
        reported: dict[str, int] = {}
        reported_end = False
        reported_at = trio.current_time()
        while True:
            await trio.sleep(MIN_REPORT_SECONDS)
            with trio.move_on_after(REPORT_SECONDS - MIN_REPORT_SECONDS):
                await reader.report_due.wait()
            now = self._operations.current_counters()
            is_ending = self._mount.is_ending
            idle = (now, is_ending) == (reported, reported_end) and not reader.accessed and not reader.stalls
            if idle and trio.current_time() - reported_at < IDLE_REPORT_SECONDS:
                if not reader.has_waiting:
                    await self._operations.await_request(HEARTBEAT_SECONDS)
                continue
            report = self._make_report()
            try:
                view = await link.call(REPORT, report, REPORT_TIMEOUT)
            except CachefsError as error:
                log.debug("no report: %s", error)
                reader.snapshots.update(report.snapshots_read or ())
                continue
            reported, reported_end, reported_at = now, is_ending, trio.current_time()
            self._daemon_instance = view.instance
            self._adopt_daemon_view(view)

    async def _wake_at_end_request(self) -> None:
        """Wake the reporting task once a signal has asked for the mount's end."""
        await trio.lowlevel.wait_readable(self._mount.end_request)
        self._operations.wake()

    async def _send_reads(self, link: DaemonLink) -> None:
        """Send which process reads which file, while users ask for it. Reads that cannot be sent are dropped."""
        while True:
            await self._operations.reading_processes.reads_recorded.wait()
            await trio.sleep(REPORT_SECONDS)
            try:
                await link.call(
                    TELL_READS, MountReadReport(reads=self._operations.reading_processes.take_reads()), REPORT_TIMEOUT
                )
            except CachefsError as error:
                log.debug("reads cannot be reported: %s", error)

    def _adopt_daemon_view(self, view: NodeView) -> None:
        """Adopt the daemon's view of its node, and pass it to the other workers."""
        if view.instance != self._last_view.view.instance:
            log.info("the daemon has restarted")

        def follow() -> None:
            self._adopt_views(self._mount.views.append_view(view))
            self._reader.adopt_view(view)
            if self._mount.views.is_long:
                self._mount.views.append_summary(self._namespace.known_slots(), self._namespace.root_changed_ns)
            self._logged_trouble = ""

        self._try_to_follow(follow)

    def _adopt_logged_views(self) -> None:
        """Adopt the views that other workers got from the daemon."""
        self._try_to_follow(lambda: self._adopt_views(self._mount.views.read_new()))

    def _try_to_follow(self, follow: Callable[[], None]) -> None:
        """Call *follow*. Logs a repeated failure only once, since each report tries again."""
        try:
            follow()
        except (CachefsError, OSError) as error:
            level = logging.DEBUG if str(error) == self._logged_trouble else logging.WARNING
            self._logged_trouble = str(error)
            log.log(level, "cannot adopt the daemon's view: %s", error)

    def _adopt_views(self, views: Sequence[LoggedView]) -> None:
        for logged in views:
            self._last_view = logged
            self._operations.reading_processes.users = logged.view.asking
            if logged.slots is None:
                self._namespace.update_datasets(logged.view.datasets)
            else:
                self._namespace.adopt_slots(logged.slots, logged.view.datasets, logged.changed_ns)

    def _report_closing(self) -> None:
        try:
            self._client.start_call(REPORT, self._make_report(closing=True), 1.0).result()
        except grpc.RpcError:
            log.debug("the daemon did not receive the last report")
        self._client.close()

    def _make_report(self, *, closing: bool = False) -> MountReport:
        """Return a report of the reads since the last call."""
        reader = self._reader
        stalls, reader.stalls = reader.stalls, []
        snapshots, reader.snapshots = reader.snapshots, set()
        return MountReport(
            id=self._mount.id,
            mountpoint=str(self._mount.directory),
            spec=str(self._mount.spec),
            pid=self._mount.pid,
            worker=self._number,
            worker_pid=os.getpid(),
            heard_from=self._daemon_instance,
            counters=self._operations.current_counters(),
            accessed=reader.take_accessed(),
            stalls=stalls,
            closing=closing,
            snapshot=self._namespace.snapshot,
            version=__version__,
            ending=self._mount.is_ending,
            snapshots_read=list(snapshots),
            connection=self._connection,
        )
