"""A host of the lab: a network namespace and a mount namespace, which live as long as a process that only waits.

Programs are started on a host by a command prefix (`LabHost.enter_command`). The host's mounts are visible on the host,
and from outside through `LabHost.path_from_outside`.
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
from cachefs_bench.lab.ports import free_ports
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill

_NEW_NET: Final = 0x40000000  # CLONE_NEWNET
# Deadline in seconds of a program that configures the network.
_SECONDS: Final = 20.0
_BACKLOG: Final = 1024
# Ends with its standard input, and so with its parent, even if the signal for that is missed.
_WAIT: Final = ("unshare", "--net", "--mount", "--", "sh", "-c", "echo ready; exec cat")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LabHost:
    """An execution environment for processes."""

    name: str
    address: str
    pid: int = 0  # of the process that holds the namespaces; 0: this process's namespaces

    @property
    def enter_command(self) -> tuple[str, ...]:
        """Words before a command that run it on the host. The started process becomes the command."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", f"--mount=/proc/{self.pid}/ns/mnt") if self.pid else ()

    def path_from_outside(self, path: Path) -> Path:
        """Return an absolute path of the host, including its mounts, as this process can open it."""
        return Path(f"/proc/{self.pid}/root", *path.parts[1:]) if self.pid else path

    def listen(self) -> socket.socket:
        """Return a socket that listens on a free port of the host's address. Any process of the machine may accept from
        it."""
        return self.run_in_network(lambda: socket.create_server((self.address, 0), backlog=_BACKLOG))

    def free_ports(self, count: int) -> range:
        """Return *count* free ports in a row on the host. Raises CachefsError if there are none."""
        return self.run_in_network(lambda: free_ports(count, self.address))

    def run_in_network(self, work: Callable[[], Result]) -> Result:
        """Run *work* in a thread within the host's network, and return its result."""
        return _in_network_of(self.pid, work) if self.pid else work()

    def start_program(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[Any]":
        """Start a program on the host, in a session of its own, and append its output to *log*. The program is killed
        when this process ends."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*KILL_WITH_PARENT, *self.enter_command, *command], stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip

    def run_command(self, *command: str, text: str = "") -> str:
        """Run a command on the host, with *text* as its input. Returns its output. Raises CachefsError."""
        return run_command([*self.enter_command, *command], text)


# This machine, where each node has a port of its own.
LOOPBACK: Final = LabHost("loopback", "127.0.0.1")


@contextmanager
def create_host(name: str, address: str) -> Iterator[LabHost]:
    """Create a host with an empty network, which vanishes with its last process."""
    process = subprocess.Popen(
        [*KILL_WITH_PARENT, *_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            assert process.stderr is not None
            raise CachefsError(f"no host for the lab: {process.stderr.read().decode(errors='replace').strip()}")
        yield LabHost(name, address, process.pid)
    finally:
        process.terminate()
        wait_or_kill(process)


def require_root() -> None:
    """Raise CachefsError with the remedy, unless this process is root."""
    if os.geteuid() != 0:
        raise CachefsError("nodes in network namespaces need root: run this with sudo, or in a container as root")


def run_command(command: list[str], text: str = "") -> str:
    """Run a command with *text* as its input, and return its output. Raises CachefsError with the begin of its error
    output."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError as error:
        raise CachefsError(f"{error.filename} is missing; install iproute2, nftables and util-linux") from None
    except subprocess.TimeoutExpired:
        raise CachefsError(f"{' '.join(command)} did not end within {_SECONDS:.0f} s") from None
    if done.returncode:
        raise CachefsError(f"{' '.join(command)}: {done.stderr.strip()[:500]}")
    return done.stdout


def wait_for(reached: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition. Raises CachefsError that *what* did not happen in time."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise CachefsError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def _in_network_of(pid: int, work: Callable[[], Result]) -> Result:
    """Run *work* in a new thread within the network namespace. What it opens stays in that network."""
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
