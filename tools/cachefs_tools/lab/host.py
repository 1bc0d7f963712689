"""A host of the lab: a network namespace and a mount namespace, which live as long as a process that only waits.

What runs on a host is started by this machine with a prefix (`Host.enter`). Its mounts are seen by what runs on the
host, and from outside below `Host.root`.
"""

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cachefs.errors import CachefsError
from cachefs_tools.lab.ports import free_ports
from cachefs_tools.scratch_node import WITH_PARENT, wait

_NEW_NET: Final = 0x40000000  # CLONE_NEWNET
# Seconds within which a program that sets up the network ends.
_SECONDS: Final = 20.0
_BACKLOG: Final = 1024
# It ends with its standard input, so with the process that started it even where the signal of that was missed.
_WAIT: Final = ("unshare", "--net", "--mount", "--", "sh", "-c", "echo ready; exec cat")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Host:
    """A place for processes."""

    name: str
    address: str
    pid: int = 0  # of the process in whose namespaces it is; 0: in ours

    @property
    def enter(self) -> tuple[str, ...]:
        """Stands before a command that is to run on the host. The process that is started becomes the command."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", f"--mount=/proc/{self.pid}/ns/mnt") if self.pid else ()

    def seen(self, path: Path) -> Path:
        """An absolute path of the host, with its mounts, as this process can open it."""
        return Path(f"/proc/{self.pid}/root", *path.parts[1:]) if self.pid else path

    def listen(self) -> socket.socket:
        """A socket that listens on a free port of the host's address. Any process of the machine may accept from it."""
        return self.within(lambda: socket.create_server((self.address, 0), backlog=_BACKLOG))

    def free_ports(self, count: int) -> range:
        """Return *count* ports in a row that are free on the host. Raises CachefsError where there are none."""
        return self.within(lambda: free_ports(count, self.address))

    def within(self, work: Callable[[], Result]) -> Result:
        """What *work* returns, which runs in a thread that is in the network of the host."""
        return _in_network_of(self.pid, work) if self.pid else work()

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[Any]":
        """Start a program on the host, in a session of its own, and append its output to *log*. The program is killed
        when this process ends."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*WITH_PARENT, *self.enter, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def run(self, *command: str, text: str = "") -> str:
        """Run a command on the host, with *text* as its input. Returns what it prints. Raises CachefsError."""
        return run([*self.enter, *command], text)


# This machine, where each node has a port of its own.
LOOPBACK: Final = Host("loopback", "127.0.0.1")


@contextmanager
def started_host(name: str, address: str) -> Iterator[Host]:
    """A new host, whose network is empty. All of it goes when nothing runs on it any more."""
    process = subprocess.Popen(
        [*WITH_PARENT, *_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            assert process.stderr is not None
            raise CachefsError(f"no host for the lab: {process.stderr.read().decode(errors='replace').strip()}")
        yield Host(name, address, process.pid)
    finally:
        process.terminate()
        wait(process)


def require_root() -> None:
    """Raises CachefsError, which says what to do."""
    if os.geteuid() != 0:
        raise CachefsError("nodes in network namespaces need root: run this with sudo, or in a container as root")


def run(command: list[str], text: str = "") -> str:
    """What a command prints that has *text* as its input. Raises CachefsError with its first words where it fails."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError as error:
        raise CachefsError(f"{error.filename} is missing; install iproute2, nftables and util-linux") from None
    except subprocess.TimeoutExpired:
        raise CachefsError(f"{' '.join(command)} did not end within {_SECONDS:.0f} s") from None
    if done.returncode:
        raise CachefsError(f"{' '.join(command)}: {done.stderr.strip()[:500]}")
    return done.stdout


def until(reached: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait. Raises CachefsError where it is not reached in time: *what* did not happen."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise CachefsError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def _in_network_of(pid: int, work: Callable[[], Result]) -> Result:
    """The network is of the thread, so this one is new and ends. What it has opened stays in that network."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace, _NEW_NET):
                    number = ctypes.get_errno()
                    raise OSError(number, f"setns: {os.strerror(number)}")
            finally:
                os.close(namespace)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter, name="lab-network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
