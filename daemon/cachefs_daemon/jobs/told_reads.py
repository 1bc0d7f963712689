"""The reads of files by process: mounts report them, and each helper receives those of its own user's processes.

Reads that no helper asks for are not kept. A mount reports nothing of users without a helper that asks
(NodeView.asking).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import Busy, ConfigError
from cachefs.read_messages import FileRead, ReadsAsked, ReadsTold
from cachefs_daemon.caller import Caller

# Seconds after its last request for which a helper counts as asking. It asks four times a second.
ASKING_SECONDS: Final = 5.0
# Most helpers that ask at once: of one user, and of all. There is one per training process.
MOST_OF_ONE: Final = 64
MOST: Final = 256
# Processes that one helper may ask for.
MOST_PROCESSES: Final = 1024
# Reads that are kept for one helper until its next request: 1.5 MB. The oldest are dropped first.
MOST_READS: Final = 4096
# Longest path that is kept: Linux allows no longer one.
MOST_PATH: Final = 4096
# Longest name of a helper.
MOST_NAME: Final = 64

_Process = tuple[int, int, int]  # user, pid namespace, number


@dataclass(slots=True)
class _Asking:
    processes: frozenset[_Process]
    # Time of the last request (monotonic seconds).
    asked: float
    reads: deque[FileRead] = field(default_factory=lambda: deque(maxlen=MOST_READS))
    missed: int = 0


class ToldReads:
    """Keeps reads for the helpers that ask. Used on the event loop."""

    def __init__(self) -> None:
        self._asking: dict[tuple[int, str], _Asking] = {}  # by user and name
        self._by_process: dict[_Process, list[_Asking]] = {}

    def ask(self, caller: Caller, request: ReadsAsked, now: float) -> ReadsTold:
        """Return the processes' reads since the last request. now: monotonic seconds. Raises ConfigError, Busy."""
        if caller.uid < 0:
            return ReadsTold(reads=[])
        if len(request.pids) > MOST_PROCESSES or len(request.asker) > MOST_NAME:
            raise ConfigError(f"one may ask for the reads of {MOST_PROCESSES} processes at most")
        self._forget_silent(now)
        key, processes = (
            (caller.uid, request.asker),
            frozenset((caller.uid, request.namespace, pid) for pid in request.pids),
        )
        asking = self._asking.get(key)
        if asking is None:
            self._check_room(caller.uid)
            asking = self._asking[key] = _Asking(processes, now)
            self._index()
        elif asking.processes != processes:
            asking.processes = processes
            self._index()
        asking.asked = now
        reads, missed = list(asking.reads), asking.missed
        asking.reads.clear()
        asking.missed = 0
        return ReadsTold(reads=reads, missed=missed)

    def add(self, reads: Sequence[FileRead]) -> None:
        """Keep the reads that a mount reports."""
        for read in reads:
            if len(read.path) > MOST_PATH:
                continue
            for asking in self._by_process.get((read.user, read.namespace, read.pid), ()):
                asking.missed += len(asking.reads) == MOST_READS
                asking.reads.append(read)

    def users(self, now: float) -> list[int]:
        """Return the users with a helper that asks, in ascending order. now: monotonic seconds."""
        self._forget_silent(now)
        return sorted({user for user, _ in self._asking})

    def _forget_silent(self, now: float) -> None:
        silent = [key for key, asking in self._asking.items() if now > asking.asked + ASKING_SECONDS]
        for key in silent:
            del self._asking[key]
        if silent:
            self._index()

    def _check_room(self, user: int) -> None:
        if len(self._asking) >= MOST or Counter(one for one, _ in self._asking)[user] >= MOST_OF_ONE:
            raise Busy(f"{len(self._asking)} training processes ask which files they read; {MOST_OF_ONE} of a user may")

    def _index(self) -> None:
        self._by_process = {}
        for asking in self._asking.values():
            for process in asking.processes:
                self._by_process.setdefault(process, []).append(asking)
