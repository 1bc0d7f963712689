"""The life of a mount process: attach to the daemon, mount, serve, report, unmount."""

import ctypes
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
import pyfuse3
import trio

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import MountReport, NodeView, Stall
from cachefs.mount import kernel, zero_open
from cachefs.mount.block_reader import BlockReader
from cachefs.mount.control import Control
from cachefs.mount.counters import Counters
from cachefs.mount.daemon_link import DaemonLink
from cachefs.mount.namespace import Namespace, spec_of_url
from cachefs.mount.operations import Operations
from cachefs.mount.options import MountOptions
from cachefs.rpc import REPORT, DaemonClient

log = logging.getLogger(__name__)

# What is fetched next, and what gives way, follows what was read: a report at least so often while there is anything to
# tell, and sooner where many blocks were read, but not more than 20 a second (each takes 1 ms of the mount).
REPORT_SECONDS: Final = 0.1
SHORTEST_REPORT_SECONDS: Final = 0.05
# A mount that has nothing to tell still shows that it is there.
IDLE_REPORT_SECONDS: Final = 10.0
REPORT_TIMEOUT: Final = 5.0
READY_SECONDS: Final = 20.0


class MountProcess:
    """One mount, from attach to unmount. Make it after the last fork: gRPC, LMDB and trio do not survive one."""

    def __init__(self, spec: str, directory: Path, options: MountOptions) -> None:
        self.spec = spec
        self.directory = directory
        self.options = options
        self.counters = Counters()
        self._id = uuid.uuid4().hex
        self._client = DaemonClient(options.socket)
        self._view = self._attach()
        if "://" in spec:
            self.spec = spec_of_url(spec, self._view.datasets)
        self._namespace = Namespace(self.spec, self._view.datasets, time.time_ns)

    def run(self, interposer: ctypes.CDLL | None, ready: Callable[[], None]) -> None:
        """Mount, call *ready* once reads are served, and serve until unmounted or told to end."""
        trio.run(self._run, interposer, ready)

    def _attach(self) -> NodeView:
        """The daemon's first answer; it may need a moment to come up, as at boot."""
        deadline = time.monotonic() + self.options.daemon_wait
        while True:
            try:
                return self._client.call(REPORT, self._report([], []), timeout=REPORT_TIMEOUT)
            except DaemonUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)

    async def _run(self, interposer: ctypes.CDLL | None, ready: Callable[[], None]) -> None:
        link = DaemonLink(self._client)
        reader = BlockReader(link, self._view, self.counters)
        control = Control(self.directory, self._namespace, link)
        operations = Operations(self._namespace, control, reader, self.options, self.counters)
        try:
            pyfuse3.init(operations, str(self.directory), fuse_options(self.spec, self.options))
        except RuntimeError:
            raise CachefsError(f"cannot mount on {self.directory}: {why_not()}") from None
        try:
            if interposer is not None and not zero_open.is_active(interposer):
                raise CachefsError("zero-open did not take hold of this libfuse; mount with -o no_zero_open")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_on_signal)
                nursery.start_soon(self._keep_reporting, reader)
                nursery.start_soon(control.serve)
                nursery.start_soon(self._announce, ready)
                await pyfuse3.main()
                nursery.cancel_scope.cancel()
        finally:
            pyfuse3.close(unmount=True)
            self._say_goodbye(reader)

    async def _announce(self, ready: Callable[[], None]) -> None:
        """A stat through our own mount proves that it answers."""
        with trio.fail_after(READY_SECONDS):
            await trio.to_thread.run_sync(os.stat, self.directory, abandon_on_cancel=True)
        if self.options.readahead:
            await trio.to_thread.run_sync(kernel.raise_readahead, self.directory, self.options.readahead)
        ready()

    async def _end_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("%s: unmounting %s", signal.Signals(number).name, self.directory)
                try:
                    # Busy mounts are detached: readers keep their files until they close them or we are gone.
                    await trio.to_thread.run_sync(lambda: kernel.unmount(self.directory, lazy=True))
                except CachefsError as error:
                    log.warning("%s", error)
                pyfuse3.terminate()

    async def _keep_reporting(self, reader: BlockReader) -> None:
        link = DaemonLink(self._client)
        reported, reported_at = self.counters.as_dict(), trio.current_time()
        while True:
            await trio.sleep(SHORTEST_REPORT_SECONDS)
            with trio.move_on_after(REPORT_SECONDS - SHORTEST_REPORT_SECONDS):
                await reader.much_accessed.wait()
            now = self.counters.as_dict()
            idle = now == reported and not reader.accessed and not reader.stalls
            if idle and trio.current_time() - reported_at < IDLE_REPORT_SECONDS:
                continue
            try:
                view = await link.call(REPORT, self._news(reader), REPORT_TIMEOUT)
            except CachefsError as error:
                log.debug("no report: %s", error)
                continue
            reported, reported_at = now, trio.current_time()
            self._follow(view, reader)

    def _follow(self, view: NodeView, reader: BlockReader) -> None:
        if view.instance != self._view.instance:
            log.info("the daemon has restarted")
        self._view = view
        try:
            reader.follow(view)
            self._namespace.update(view.datasets)
        except (CachefsError, OSError) as error:
            log.warning("cannot follow the daemon's news: %s", error)

    def _say_goodbye(self, reader: BlockReader) -> None:
        report = self._news(reader, closing=True)
        try:
            self._client.begin(REPORT, report, 1.0).result()
        except grpc.RpcError:
            log.debug("no daemon to say goodbye to")
        self._client.close()

    def _news(self, reader: BlockReader, *, closing: bool = False) -> MountReport:
        """All that was read since the last call."""
        accessed, reader.accessed = reader.accessed, {}
        reader.much_accessed = trio.Event()
        stalls, reader.stalls = reader.stalls, []
        return self._report(list(accessed), stalls, closing=closing)

    def _report(self, accessed: list[bytes], stalls: list[Stall], *, closing: bool = False) -> MountReport:
        return MountReport(
            id=self._id,
            mountpoint=str(self.directory),
            spec=self.spec,
            pid=os.getpid(),
            counters=self.counters.as_dict(),
            accessed=accessed,
            stalls=stalls,
            closing=closing,
        )


def fuse_options(spec: str, options: MountOptions) -> set[str]:
    """libfuse's own options.

    Read-only keeps the kernel from dropping cached attributes after each read (atime). default_permissions lets the
    kernel check modes, which costs 7 % of a warm open+fstat+read+close (0.88 of native with it, 0.95 without, one
    reader); so it is asked for only where a umask makes modes deny anything.
    """
    # libfuse would take what follows a bare comma for an option of its own.
    source = spec.replace(",", "\\,")
    given = {"ro", f"fsname=cachefs:{source}", "subtype=cachefs", *options.kernel}
    if options.allow_other:
        given.add("allow_other")
    if options.umask & 0o555:
        given.add("default_permissions")
    return given


def why_not() -> str:
    """The likeliest reason that libfuse would not mount, after what it has printed itself."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist; load the fuse module, or give the container the device"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no permission for /dev/fuse"
    if os.geteuid() != 0:
        return "fusermount3 refused; is the package fuse3 installed, and user_allow_other set for -o allow_other?"
    return "the kernel refused; a container needs CAP_SYS_ADMIN"
