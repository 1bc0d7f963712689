"""A pusher for tests.

It is the process that a mount's supervisor starts, but on a mount that has none, and the test itself gives it orders.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty as NothingThere
from queue import Queue
from typing import Any, Final

import grpc
import numpy as np
import psutil

from cachefs.messages import DatasetView, Empty
from cachefs.mount import kernel
from cachefs.push_messages import PushAcknowledgement, PushCommand, PushReport, PushSubscription
from cachefs.rpc import NODE, PUSH, PUSH_REPORT, SERVICE, DaemonClient, encode, response_decoder
from cachefs.snapshot import Snapshot
from tests.waiting import until

_PIDFD_GETFD: Final = 438
_FUSE_DEV_IOC_CLONE: Final = 0x8004E500
MOUNT: Final = "a-mount"


def cloned_device(pid: int) -> int:
    """A new descriptor, in this process, on the FUSE connection that the process *pid* serves."""
    links = {int(link.name): os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    theirs = next(number for number, target in links.items() if target == "/dev/fuse")
    pidfd = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    original = libc.syscall(_PIDFD_GETFD, pidfd, theirs, 0)
    assert original >= 0, os.strerror(ctypes.get_errno())
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _FUSE_DEV_IOC_CLONE, struct.pack("I", original))
    os.close(original)
    os.close(pidfd)
    return device


@dataclass(frozen=True)
class Pusher:
    """A running pusher."""

    process: psutil.Process
    supervisor: "subprocess.Popen[bytes]"  # stands in for the mount's supervisor


# What a mount's supervisor does in a fork.
_PROGRAM: Final = """
import logging, os, sys
{patch}
from pathlib import Path
from cachefs.mount.reads import read_records
from cachefs.mount.device import FuseConnection
from cachefs.mount.push.pusher import run_pusher
from cachefs.mount.push.pusher import PusherSettings
from cachefs.mount_spec import MountSpec
from cachefs.sizes import parse_share
device, socket, spec, directory, connection, mount, parent = sys.argv[1:]
logging.basicConfig(level=logging.DEBUG, filename=directory + ".push.log")
settings = PusherSettings(
    int(device), read_records.create_read_marks(), MountSpec.parse(spec), Path(directory), mount, Path(socket),
    parse_share("50%"), 2,
)
run_pusher(settings, FuseConnection(int(connection), settings.directory), int(parent) or os.getppid())
os._exit(0)
"""


def push_command(device: int, socket: Path, spec: str, directory: Path, parent: int = 0, patch: str = "") -> list[str]:
    """The command of a pusher. *patch* is Python code that runs before its own.

    parent: process id of the supervisor that it ends with; 0 for the one that starts the command.
    """
    given = (device, socket, spec, directory, kernel.connection_number(directory), MOUNT, parent)
    return [sys.executable, "-c", _PROGRAM.format(patch=patch), *map(str, given)]


@contextlib.contextmanager
def pusher(device: int, socket: Path, spec: str, directory: Path, patch: str = "") -> Iterator[Pusher]:
    """A running pusher, whose log is beside *directory*. It ends with its supervisor, which is killed in the end.

    The descriptor *device* is given to the pusher and closed in this process.
    """
    command = push_command(device, socket, spec, directory, patch=patch)
    supervisor = subprocess.Popen(["sh", "-c", '"$@" & wait $!', "sh", *command], pass_fds=(device,))
    os.close(device)
    try:
        yield Pusher(_only_child(supervisor.pid), supervisor)
    finally:
        supervisor.kill()
        supervisor.wait(60)


def _only_child(pid: int) -> psutil.Process:
    return until(psutil.Process(pid).children, "a pusher is started")[0]


@dataclass
class Orders:
    """The daemon's side of pushing. Whatever else a pusher asks, the real daemon is asked."""

    real: DaemonClient
    subscribed: "Queue[PushSubscription]" = field(default_factory=Queue)  # requests for orders, oldest first
    reports: "Queue[PushReport]" = field(default_factory=Queue)  # reports of pushers, oldest first
    counters: dict[str, int] = field(default_factory=dict)  # of the last report that was looked at
    _stream: "Queue[PushCommand | None]" = field(default_factory=Queue)  # orders to send; None ends the stream
    _serial: int = 0  # of the last order

    def give(
        self, view: DatasetView, paths: Sequence[str], *, drop: bool = False, numbers: Sequence[int] | None = None
    ) -> int:
        """Order a block of each path to be pushed, or dropped. Returns the order's serial.

        *numbers* are the numbers of the blocks; without them the first block of each path is meant.
        """
        snapshot = Snapshot(Path(view.path))
        found = [snapshot.find_path(path.encode()) for path in paths]
        snapshot.close()
        entries = [10**9 if entry is None else entry.number for entry in found]
        return self.give_entries(view.snapshot, entries, numbers or [0] * len(entries), drop=drop)

    def give_entries(self, snapshot: str, entries: Sequence[int], numbers: Sequence[int], *, drop: bool = False) -> int:
        """The same for entries of the snapshot, which are given by their numbers."""
        self._serial += 1
        packed = np.array(entries, "<u8").tobytes(), np.array(numbers, "<u4").tobytes()
        self._stream.put(
            PushCommand(serial=self._serial, snapshot=snapshot, entries=packed[0], numbers=packed[1], drop=drop)
        )
        return self._serial

    def failed(self, serial: int, seconds: float = 30) -> list[int]:
        """Wait for the report of an order. Returns the places in the order that failed. Other reports are ignored."""
        while True:
            try:
                report = self.reports.get(timeout=seconds)
            except NothingThere:
                raise AssertionError(f"order {serial} is not reported as done") from None
            self.counters = report.counters
            for done in report.done:
                if done.serial == serial:
                    return np.frombuffer(done.failed, "<u4").tolist()

    def hang_up(self) -> None:
        """End the stream, as a daemon that restarts does. The next subscriber gets a new stream."""
        self._serial = 0
        self._stream.put(None)

    # --- what a pusher calls --------------------------------------------------------------------------------------

    def push(self, request: bytes, _: Any) -> Iterator[bytes]:
        self.subscribed.put(response_decoder(PushSubscription)(request))
        while (order := self._stream.get()) is not None:
            yield encode(order)

    def push_report(self, request: bytes, _: Any) -> bytes:
        self.reports.put(response_decoder(PushReport)(request))
        return encode(PushAcknowledgement())

    def node(self, request: bytes, _: Any) -> bytes:
        return encode(self.real.call(NODE, Empty()))


@contextlib.contextmanager
def orders(socket: Path, real: DaemonClient) -> Iterator[Orders]:
    """The orders, served at *socket* while the block runs."""
    serving = Orders(real)
    handlers = {
        PUSH.name: grpc.unary_stream_rpc_method_handler(serving.push),
        PUSH_REPORT.name: grpc.unary_unary_rpc_method_handler(serving.push_report),
        NODE.name: grpc.unary_unary_rpc_method_handler(serving.node),
    }
    server = grpc.server(ThreadPoolExecutor(8), handlers=[grpc.method_handlers_generic_handler(SERVICE, handlers)])
    assert server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield serving
    finally:
        serving.hang_up()
        server.stop(0).wait(60)
