"""Which process reads which file, for users who ask for that (cachefs.read_messages).

A request has the number of the thread that has sent it, in the mount's pid namespace. Which process that is, whose, and
which numbers it has in its own namespace, is in /proc, where the thread waits while its request is answered. That is
looked up for users who ask only, and once a second for a thread.
"""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from cachefs.read_messages import FileRead

# Reads that are kept between two messages to the daemon, and threads that are remembered, at most.
MOST_READS: Final = 4096
MOST_THREADS: Final = 4096
# Nanoseconds for which a thread is remembered. Its number may be another's later.
_REMEMBERED: Final = 1_000_000_000
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A thread, and the process it belongs to, by the numbers in their own pid namespace (its inode number)."""

    user: int
    namespace: int
    pid: int
    thread: int


class ReadingProcesses:
    """The reads of one worker."""

    def __init__(self, reading_thread: Callable[[], int] = lambda: 0) -> None:
        """reading_thread: the number of the thread whose read is being taken, 0 where nobody knows it."""
        self.users: Collection[int] = ()  # of whom reads are noted; `note` is to be called where there are any
        self._reading_thread = reading_thread
        self._reads: dict[tuple[int, int], FileRead] = {}  # by thread and inode
        self.noted = trio.Event()  # set where `take` has something to return
        self._threads: dict[int, tuple[int, Process | None]] = {}  # until when they are remembered

    def note(self, inode: int, path: Callable[[int], bytes]) -> None:
        """The request that is being taken reads this file. path: says the path of an inode in the mount, or raises
        anything. Costs 0.5 us where it is noted already, else 2 us, and 0.1 ms for another thread."""
        thread = self._reading_thread()
        if thread <= 0 or (thread, inode) in self._reads or len(self._reads) >= MOST_READS:
            return
        now = time.monotonic_ns()
        process = self._process(thread, now)
        if process is None or process.user not in self.users:
            return
        try:
            name = path(inode)
        except Exception:
            return  # the read itself fails, and says so; or it does not, and nobody hears of it
        self._reads[thread, inode] = FileRead(
            user=process.user,
            namespace=process.namespace,
            pid=process.pid,
            thread=process.thread,
            inode=inode,
            path=name,
            when=now,
        )
        self.noted.set()

    def take(self) -> list[FileRead]:
        """What was noted since the last call."""
        reads, self._reads = self._reads, {}
        self.noted = trio.Event()
        return list(reads.values())

    def _process(self, thread: int, now: int) -> Process | None:
        until, process = self._threads.get(thread, (0, None))
        if now > until:
            if len(self._threads) >= MOST_THREADS:
                self._threads.clear()
            process = process_of(thread)
            self._threads[thread] = now + _REMEMBERED, process
        return process


def process_of(thread: int) -> Process | None:
    """What a thread with that number here belongs to; None where that is not to be seen, and for a process that has
    several users: what it reads is none of theirs to know."""
    place = _PROC / str(thread)
    try:
        status = (place / "status").read_bytes()
        namespace = os.stat(place / "ns" / "pid").st_ino
    except OSError:
        return None
    fields = {name: value.split() for name, _, value in (line.partition(b":") for line in status.splitlines())}
    users = set(fields.get(b"Uid", [])[:3])
    if len(users) != 1 or not fields.get(b"NStgid") or not fields.get(b"NSpid"):
        return None
    return Process(int(users.pop()), namespace, int(fields[b"NStgid"][-1]), int(fields[b"NSpid"][-1]))
