"""Records of reads in memory that all processes of a mount share: which blocks were read recently, and by which
processes.

Read marks: a reader that is faster than the pusher reads the blocks that the pusher is about to store, and both then
load the same pages. Reports through the daemon tell of a read 0.1 s later, hundreds of reads too late. A worker
therefore sets a mark when it begins to read a whole block, and the pusher checks the mark before it stores a block.
Blocks with the same hash share a slot. A mark overwritten by another block's no longer matches its block, which is then
stored needlessly; that costs time only.

Reader table: after a signal to end, a mount must not be unmounted under a program that has read it and may read on,
however long it pauses. The table maps the process id of each reader, known from its requests, to the process's start
time, which tells it from a later process with the same id. A worker process of a loader ends with its epoch, and its
parent starts the next one. A process that was forked, or started by multiprocessing, therefore counts for its parent
too; a program started by a shell counts for itself only.

Limits: what the kernel answers from its caches is no request. Processes outside the mount's pid namespace have no id
here: the table records that some have read, but not whether they still run.
"""

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.block import block_number

_MARK_ENTRIES: Final = 1 << 16
# First half of the content id, block number, time of the read (ms).
_MARK: Final = struct.Struct("<8sII")
_MILLISECONDS: Final = (1 << 32) - 1
# Milliseconds for which a mark is valid: long enough for a pusher that is late, and short enough for the pages to be
# still cached.
_VALID_MILLISECONDS: Final = 2000
_PROC: Final = Path("/proc")
# Highest process id that a kernel gives (PID_MAX_LIMIT). The table takes memory only where an entry was written.
_MAX_PROCESSES: Final = 1 << 22
_SLOT: Final = struct.Struct("I")
# Entry for processes without an id in this namespace.
_OUTSIDERS: Final = 0
# Seconds for which a thread is remembered, as its id may be reused; and the most threads remembered.
_REMEMBERED_SECONDS: Final = 10.0
_MAX_THREADS: Final = 4096
# Most ancestors that one process counts for.
_MAX_PARENTS: Final = 8
# Parts of the command of a process started by multiprocessing or joblib.
_STARTERS: Final = (b"from multiprocessing.", b"loky.backend")


def create_read_marks() -> int:
    """Return a descriptor for ReadMarks, in this process and in others that inherit it."""
    fd = os.memfd_create("cachefs-read-marks", os.MFD_CLOEXEC)
    os.ftruncate(fd, _MARK_ENTRIES * _MARK.size)
    return fd


class ReadMarks:
    """The marks. Setting one takes 1.5 us, checking one 1.3 us."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _MARK_ENTRIES * _MARK.size)

    def set(self, key: bytes) -> None:
        """Mark a block that is being read, from its start and in the largest possible reads."""
        number = block_number(key)
        _MARK.pack_into(self._memory, _mark_offset(key, number), key[:8], number, _now())

    def clear(self, key: bytes) -> None:
        """Remove the mark of a block whose pages are dropped."""
        _MARK.pack_into(self._memory, _mark_offset(key, block_number(key)), bytes(8), 0, 0)

    def age(self, key: bytes) -> float:
        """Return the seconds since the block was read; infinity where that was more than 2 s ago, or never."""
        number = block_number(key)
        name, marked, when = _MARK.unpack_from(self._memory, _mark_offset(key, number))
        age = (_now() - when) & _MILLISECONDS
        return age / 1000 if name == key[:8] and marked == number and age < _VALID_MILLISECONDS else math.inf


def _mark_offset(key: bytes, number: int) -> int:
    return (int.from_bytes(key[8:10]) ^ (number & 0xFFFF)) * _MARK.size


def _now() -> int:
    """Return the milliseconds of a clock shared by all processes."""
    return int(time.monotonic() * 1000) & _MILLISECONDS


@dataclass(frozen=True, slots=True)
class _ReaderProcess:
    pid: int
    parent: int
    # The table's entry for the process: never 0.
    began: int
    command: bytes

    def is_part_of(self, parent: "_ReaderProcess") -> bool:
        """Return whether this process is a part of the parent's program."""
        return self.command == parent.command or any(starter in self.command for starter in _STARTERS)


def create_reader_table() -> int:
    """Return a descriptor for ReaderTable, in this process and in others that inherit it."""
    fd = os.memfd_create("cachefs-readers", os.MFD_CLOEXEC)
    os.ftruncate(fd, _MAX_PROCESSES * _SLOT.size)
    return fd


class ReaderTable:
    """Access of one process of the mount to the table."""

    def __init__(self, fd: int, supervisor: int) -> None:
        """supervisor: its process id; it and its children belong to the mount, and do not count as readers."""
        self._fd = fd
        self._supervisor = supervisor
        self._recent_threads: dict[int, float] = {}  # thread -> until when it is remembered (monotonic seconds)

    def record_reader(self, thread: int) -> None:
        """Record that a thread has read the mount. thread: its id in this namespace, 0 where it has none. Costs 0.5 us,
        and 0.2 ms for a thread that is not remembered."""
        now = time.monotonic()
        if now < self._recent_threads.get(thread, 0.0):
            return
        if len(self._recent_threads) >= _MAX_THREADS:
            self._recent_threads.clear()
        self._recent_threads[thread] = now + _REMEMBERED_SECONDS
        if thread == _OUTSIDERS:
            self._write_entry(_OUTSIDERS, 1)
            return
        process = _find_process_of(thread)
        for _ in range(_MAX_PARENTS):
            if process is None or self._is_own(process):
                return
            self._write_entry(process.pid, process.began)
            parent = _find_process(process.parent)
            process = parent if parent is not None and process.is_part_of(parent) else None

    def describe_living_reader(self) -> str:
        """Return a description of a process that has read the mount and still runs; empty where none is known."""
        for name in os.listdir(_PROC):
            if name.isdecimal() and (began := self._read_entry(int(name))):
                process = _find_process(int(name))
                if process is not None and process.began == began:
                    command = process.command.replace(b"\0", b" ").decode(errors="replace").strip()
                    return f"process {process.pid} has read it and still runs: {command!a:.80}"
        return "processes outside of its pid namespace have read it" if self._read_entry(_OUTSIDERS) else ""

    def _is_own(self, process: _ReaderProcess) -> bool:
        return self._supervisor in (process.pid, process.parent)

    def _write_entry(self, pid: int, began: int) -> None:
        os.pwrite(self._fd, _SLOT.pack(began), pid * _SLOT.size)

    def _read_entry(self, pid: int) -> int:
        began: int = _SLOT.unpack(os.pread(self._fd, _SLOT.size, pid * _SLOT.size))[0]
        return began


def _find_process_of(thread: int) -> _ReaderProcess | None:
    """Return the process of a thread; None where it has ended."""
    try:
        status = (_PROC / str(thread) / "status").read_bytes()
    except OSError:
        return None
    return _find_process(int(status.partition(b"\nTgid:\t")[2].partition(b"\n")[0]))


def _find_process(pid: int) -> _ReaderProcess | None:
    """Return process *pid*; None where it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return _ReaderProcess(pid, int(fields[1]), int(fields[19]) % ((1 << 32) - 1) + 1, command)
