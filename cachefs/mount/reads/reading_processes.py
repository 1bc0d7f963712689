"""Records which process reads which file, for users who ask for it (cachefs.read_messages).

A request has the id of its thread in the mount's pid namespace. The thread waits for the answer, so /proc tells its
process, its user, and its ids in its own namespace. These are looked up only while users ask, and once a second per
thread.
"""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from cachefs.read_messages import FileRead

# Most reads that are kept between two messages to the daemon, and most threads that are remembered.
MAX_READS: Final = 4096
MAX_THREADS: Final = 4096
# Nanoseconds for which a thread is remembered. Its id may be reused later.
_REMEMBERED_NS: Final = 1_000_000_000
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class ReadingProcess:
    """A thread and its process, with their ids in their own pid namespace (the namespace's inode number)."""

    user: int
    namespace: int
    pid: int
    thread: int


class ReadingProcesses:
    """Records the reads of one worker."""

    def __init__(self, reading_thread: Callable[[], int] = lambda: 0) -> None:
        """reading_thread: returns the thread whose read is being taken, 0 where unknown."""
        self.users: Collection[int] = ()  # whose reads are recorded; where empty, `record_read` need not be called
        self._reading_thread = reading_thread
        self._reads: dict[tuple[int, int], FileRead] = {}  # by thread and inode
        self.reads_recorded = trio.Event()  # set when `take_reads` has something to return
        self._threads: dict[
            int, tuple[int, ReadingProcess | None]
        ] = {}  # thread -> until when it is remembered, its process

    def record_read(self, inode: int, path: Callable[[int], bytes]) -> None:
        """Record that the current request reads file *inode*. path: returns the path of an inode in the mount, or
        raises any exception. Costs 0.5 us where the read is recorded already, else 2 us, and 0.1 ms for a new
        thread."""
        thread = self._reading_thread()
        if thread <= 0 or (thread, inode) in self._reads or len(self._reads) >= MAX_READS:
            return
        now = time.monotonic_ns()
        process = self._process_of_thread(thread, now)
        if process is None or process.user not in self.users:
            return
        try:
            name = path(inode)
        except Exception:
            return  # the read itself reports its failure, if it fails
        self._reads[thread, inode] = FileRead(
            user=process.user,
            namespace=process.namespace,
            pid=process.pid,
            thread=process.thread,
            inode=inode,
            path=name,
            when=now,
        )
        self.reads_recorded.set()

    def take_reads(self) -> list[FileRead]:
        """Return the reads recorded since the last call."""
        reads, self._reads = self._reads, {}
        self.reads_recorded = trio.Event()
        return list(reads.values())

    def _process_of_thread(self, thread: int, now: int) -> ReadingProcess | None:
        until, process = self._threads.get(thread, (0, None))
        if now > until:
            if len(self._threads) >= MAX_THREADS:
                self._threads.clear()
            process = find_process(thread)
            self._threads[thread] = now + _REMEMBERED_NS, process
        return process


def find_process(thread: int) -> ReadingProcess | None:
    """Return the process of a thread of this namespace; None where it is not visible, and for a process with several
    user ids, whose reads none of these users may see."""
    directory = _PROC / str(thread)
    try:
        status = (directory / "status").read_bytes()
        namespace = os.stat(directory / "ns" / "pid").st_ino
    except OSError:
        return None
    fields = {name: value.split() for name, _, value in (line.partition(b":") for line in status.splitlines())}
    users = set(fields.get(b"Uid", [])[:3])
    if len(users) != 1 or not fields.get(b"NStgid") or not fields.get(b"NSpid"):
        return None
    return ReadingProcess(int(users.pop()), namespace, int(fields[b"NStgid"][-1]), int(fields[b"NSpid"][-1]))
