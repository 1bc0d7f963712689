"""Batches of small file reads, writes and holes in one call, so that the interpreter lock is released once per batch.

Where other threads wait for that lock, each call of the `os` module costs two wake-ups and a wait, which is more than
to write 110 KB into memory. So `_batch_io.c` does whole batches. Where it was not built, functions in Python do the
same, one call after the other.

Files are given by their names in one directory, and are opened for the batch only.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

Buffer = bytes | bytearray | memoryview
Read = tuple[bytes, int, memoryview]  # name of a file, offset in it, destination
Span = tuple[bytes, int, int]  # name of a file; start and length of a part of it
Write = tuple[int, tuple[Buffer, ...]]  # offset in a file, and the parts to write there

KEEP_SIZE: Final = 0x01
PUNCH_HOLE_KEEP_SIZE: Final = 0x03

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(fd: int, mode: int, start: int, length: int) -> None:
    """Raises OSError."""
    if _libc.fallocate(fd, mode, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _LastOpenFile:
    """Keeps the last file open, for further calls with the same name."""

    def __init__(self, directory: int, flags: int) -> None:
        self._directory, self._flags = directory, flags
        self._name, self._fd = b"", -1

    def call_with_file(self, work: Callable[..., int], name: bytes, *args: Any) -> int:
        """Return what *work* returns for the file's descriptor and *args*, or minus an error number."""
        try:
            if self._fd < 0 or name != self._name:
                self.close()
                self._fd = os.open(name, self._flags, dir_fd=self._directory)
                self._name = name
            return work(self._fd, *args)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_many_in_python(directory: int, flags: int, reads: Sequence[Read]) -> list[int]:
    """See `_fastest_functions`."""
    files = _LastOpenFile(directory, flags)
    try:
        return [files.call_with_file(_read, name, start, buffer) for name, start, buffer in reads]
    finally:
        files.close()


def punch_many_in_python(directory: int, flags: int, spans: Sequence[Span]) -> list[int]:
    """See `_fastest_functions`."""
    files = _LastOpenFile(directory, flags)
    try:
        return [files.call_with_file(_punch, name, start, length) for name, start, length in spans]
    finally:
        files.close()


def write_many_in_python(
    directory: int, flags: int, name: bytes, unit: int, writes: Sequence[Write]
) -> tuple[int, int]:
    """See `_fastest_functions`."""
    file = _LastOpenFile(directory, flags)
    try:
        for number, (start, parts) in enumerate(writes):
            if failed := file.call_with_file(write_parts, name, start, parts, unit):
                return number, -failed
        return len(writes), 0
    finally:
        file.close()


def _read(fd: int, start: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer) and (got := os.preadv(fd, [buffer[done:]], start + done)):
        done += got
    return done


def _punch(fd: int, start: int, length: int) -> int:
    fallocate(fd, PUNCH_HOLE_KEEP_SIZE, start, length)
    return 0


def write_parts(fd: int, start: int, parts: Sequence[Buffer], unit: int) -> int:
    """Write *parts*, one after the other, to an open file; unit: see `_fastest_functions`. Raises OSError. Returns
    0."""
    left = [memoryview(part).cast("B") for part in parts if part]
    if unit:
        fallocate(fd, KEEP_SIZE, start, -(-sum(map(len, left)) // unit) * unit)
    while left:
        written = os.pwritev(fd, left, start)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        start += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return 0


_ReadMany = Callable[[int, int, Sequence[Read]], list[int]]
_PunchMany = Callable[[int, int, Sequence[Span]], list[int]]
_WriteMany = Callable[[int, int, bytes, int, Sequence[Write]], tuple[int, int]]


def _fastest_functions() -> tuple[_ReadMany, _PunchMany, _WriteMany]:
    """Return three functions, each of (directory, flags, ...): the descriptor of a directory, and the flags to open its
    files.

    (..., reads): fill buffers. Returns for each how many bytes were read, fewer at a file's end; or minus an error
    number.

    (..., spans): free the disk space of parts of files. Returns for each 0 or minus an error number.

    (..., name, unit, writes): write to one file, up to the first write that fails. Returns how many were done, and the
    error number of the failed one, or 0. unit: where it is not 0, space for each write is allocated before, as one
    extent of whole units of that many bytes.
    """
    try:
        from cachefs_daemon.store import _batch_io as compiled

        return compiled.read_many, compiled.punch_many, compiled.write_many
    except (ImportError, AttributeError):  # not built here, or for another machine or version
        return read_many_in_python, punch_many_in_python, write_many_in_python


read_many, punch_many, write_many = _fastest_functions()
