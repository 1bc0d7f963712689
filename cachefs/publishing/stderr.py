"""Writes lines for the user to the standard error that the process was started with.

A job may replace `sys.stderr` by an object that takes locks, and the reader of descriptor 2 may be gone, or not read. A
line therefore goes to descriptor 2 itself, only while that is the file it was at the start, and only where the kernel
takes the line at once. Any other line is dropped. No line raises SIGPIPE.

`OwnDescriptor` is a descriptor that cachefs keeps open in the job's process between two of its own calls. The job may
close any number, such as by `os.closerange`, and open a file of its own that gets the same number. A descriptor is
therefore remembered with the device and inode of its file, and its number is used only as long as both are the same.
Nothing is closed when Python collects an object: only the end of the process closes descriptors.
"""

import contextlib
import os
import select
import signal
import stat
import sys
from collections.abc import Iterator
from typing import Final

from cachefs.publishing.job_exceptions import is_from_job, suppress_own


def file_identity(fd: int) -> tuple[int, int] | None:
    """Return device and inode of the open file with this number; None where no file is open."""
    try:
        found = os.fstat(fd)
    except OSError as error:
        if is_from_job(error):
            raise
        return None
    return found.st_dev, found.st_ino


class OwnDescriptor:
    """An open descriptor that is valid as long as the job leaves it alone."""

    __slots__ = ("_fd", "_identity")

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self._identity = file_identity(fd)

    @property
    def number(self) -> int | None:
        """Return the number of the descriptor; None once it was closed, also by the job."""
        if self._identity is None or file_identity(self._fd) != self._identity:
            self._identity = None
            return None
        return self._fd

    def close(self) -> None:
        """Close the descriptor, unless its number belongs to another file by now."""
        number = self.number
        self._identity = None
        if number is not None:
            os.close(number)


# Attribute of `sys`: identity of the standard error when the process began, set by the hooks' sitecustomize.
STARTED_WITH: Final = "_cachefs_stderr"
initial_identity: Final = getattr(sys, STARTED_WITH, None) or file_identity(2)


def write_line(line: str) -> None:
    """Write one line of at most PIPE_BUF bytes, where that is possible at once."""
    text = line.rstrip("\n").encode(errors="backslashreplace")[: select.PIPE_BUF - 1] + b"\n"
    if file_identity(2) == initial_identity and is_writable_now(2):
        with suppress_own(OSError), without_sigpipe():
            _write(text)


def is_writable_now(fd: int) -> bool:
    """Return whether the open file takes some bytes without waiting: it is a regular file, or has room and a reader."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return poll.poll(0) == [(fd, select.POLLOUT)]


@contextlib.contextmanager
def without_sigpipe() -> Iterator[None]:
    """Make writes in this block and thread raise BrokenPipeError, and no SIGPIPE, where the pipe has no reader."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pending = signal.SIGPIPE in signal.sigpending()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        yield
    finally:
        try:  # a handler of the job may raise an exception anywhere in here
            if not pending and signal.SIGPIPE in signal.sigpending():
                signal.sigtimedwait([signal.SIGPIPE], 0)
        finally:
            if signal.SIGPIPE not in blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])


def _write(text: bytes) -> None:
    """Write to descriptor 2. RWF_NOWAIT: another process may fill a pipe after the poll. Raises OSError."""
    if stat.S_ISFIFO(os.fstat(2).st_mode):
        try:
            os.pwritev(2, [text], -1, os.RWF_NOWAIT)
            return
        except BlockingIOError:
            return
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
    os.write(2, text)  # also where this kernel does not support RWF_NOWAIT for pipes
