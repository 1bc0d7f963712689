"""Writes to the stderr of the training process, for lines that cannot wait until that process runs code of cachefs.

While a training process waits for a read, it prints nothing: its threads are in the kernel. Its helper therefore writes
the line itself, to the file, pipe or terminal that was the process's descriptor 2 when the process started. The helper
has that file open only while it writes, so that the reader of a pipe sees its end when the job ends. Writing never
waits; a line that cannot be written is left to the training process (cachefs.publishing.page).
"""

import contextlib
import ctypes
import os
import select
import stat
from typing import Final

# System call number of Linux, the same on all architectures since Linux 5.6; `os` lacks the call.
_PIDFD_GETFD: Final = 438
_STDERR: Final = 2


class JobStderr:
    def __init__(self, pid: int, pidfd: int, started_with: tuple[int, int] | None) -> None:
        """pidfd: a descriptor of the process; started_with: device and inode of its stderr when it started. Descriptor
        2 may be another file by now, as where the job captures its output."""
        self._path = f"/proc/{pid}/fd/{_STDERR}"
        self._flags = f"/proc/{pid}/fdinfo/{_STDERR}"
        self._pidfd = pidfd
        now = self._identity()
        self._initial_identity = now if now is not None and now[:2] == started_with else None

    def write_line(self, line: str) -> bool:
        """Write a line. Return False where writing may wait or fail, or descriptor 2 is another file now."""
        first = self._initial_identity
        if first is None or self._identity() != first:
            return False
        with contextlib.suppress(OSError):
            fd = self._open()
            try:
                # Another process may have replaced the file meanwhile.
                found = os.fstat(fd)
                text = line.encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n"
                return (found.st_dev, found.st_ino) == first[:2] and os.write(fd, text) == len(text)
            finally:
                os.close(fd)
        return False

    def _identity(self) -> tuple[int, int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self._path)
            return found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode)
        return None

    def _open(self) -> int:
        """Raises OSError."""
        assert self._initial_identity is not None
        if self._initial_identity[2] != stat.S_IFREG:
            return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        # The job would overwrite our lines: a newly opened file has its own position. With O_APPEND both write at the
        # end.
        if self._is_appending():
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, self._pidfd, _STDERR, 0))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return fd

    def _is_appending(self) -> bool:
        with open(self._flags) as lines:
            flags = next((line.split()[1] for line in lines if line.startswith("flags:")), "0")
        return bool(int(flags, 8) & os.O_APPEND)
