"""The reads of files by process: mounts report them, and each helper receives those of its own user's processes.

Reads that no helper asks for are not kept. A mount reports nothing of users without a helper that asks
(NodeView.asking).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import Busy, ConfigError
from cachefs.read_messages import FileRead, ReadsRequest, ReadsResponse
from cachefs_daemon.caller import Caller

# Seconds after its last request for which a helper counts as asking. It asks four times a second.
HELPER_SECONDS: Final = 5.0
# Most helpers that ask at once: of one user, and of all. There is one per training process.
MAX_HELPERS_OF_USER: Final = 64
MAX_HELPERS: Final = 256
# Processes that one helper may ask for.
MAX_PROCESSES: Final = 1024
# Reads that are kept for one helper until its next request: 1.5 MB. The oldest are dropped first.
MAX_READS: Final = 4096
# Longest path that is kept: Linux allows no longer one.
MAX_PATH: Final = 4096
# Longest name of a helper.
MAX_NAME: Final = 64

_Process = tuple[int, int, int]  # user, pid namespace, number


@dataclass(slots=True)
class _HelperReads:
    processes: frozenset[_Process]
    # Time of the last request (monotonic seconds).
    requested_at: float
    reads: deque[FileRead] = field(default_factory=lambda: deque(maxlen=MAX_READS))
    dropped: int = 0


class ProcessReads:
    """Keeps reads for the helpers that ask. Used on the event loop."""

    def __init__(self) -> None:
        self._helpers: dict[tuple[int, str], _HelperReads] = {}  # by user and name
        self._by_process: dict[_Process, list[_HelperReads]] = {}

    def take_reads(self, caller: Caller, request: ReadsRequest, now: float) -> ReadsResponse:
        """Return the processes' reads since the last request. now: monotonic seconds. Raises ConfigError, Busy."""
        if caller.uid < 0:
            return ReadsResponse(reads=[])
        if len(request.pids) > MAX_PROCESSES or len(request.asker) > MAX_NAME:
            raise ConfigError(f"a request for reads may name at most {MAX_PROCESSES} processes")
        self._forget_silent(now)
        key, processes = (
            (caller.uid, request.asker),
            frozenset((caller.uid, request.namespace, pid) for pid in request.pids),
        )
        helper = self._helpers.get(key)
        if helper is None:
            self._check_limits(caller.uid)
            helper = self._helpers[key] = _HelperReads(processes, now)
            self._rebuild_index()
        elif helper.processes != processes:
            helper.processes = processes
            self._rebuild_index()
        helper.requested_at = now
        reads, missed = list(helper.reads), helper.dropped
        helper.reads.clear()
        helper.dropped = 0
        return ReadsResponse(reads=reads, missed=missed)

    def add_reads(self, reads: Sequence[FileRead]) -> None:
        """Keep the reads that a mount reports."""
        for read in reads:
            if len(read.path) > MAX_PATH:
                continue
            for helper in self._by_process.get((read.user, read.namespace, read.pid), ()):
                helper.dropped += len(helper.reads) == MAX_READS
                helper.reads.append(read)

    def users_with_helpers(self, now: float) -> list[int]:
        """Return the users with a helper that asks, in ascending order. now: monotonic seconds."""
        self._forget_silent(now)
        return sorted({user for user, _ in self._helpers})

    def _forget_silent(self, now: float) -> None:
        silent = [key for key, helper in self._helpers.items() if now > helper.requested_at + HELPER_SECONDS]
        for key in silent:
            del self._helpers[key]
        if silent:
            self._rebuild_index()

    def _check_limits(self, user: int) -> None:
        if len(self._helpers) >= MAX_HELPERS or Counter(one for one, _ in self._helpers)[user] >= MAX_HELPERS_OF_USER:
            raise Busy(
                f"{len(self._helpers)} training processes request their reads; the limit is {MAX_HELPERS_OF_USER} per "
                f"user and {MAX_HELPERS} in all"
            )

    def _rebuild_index(self) -> None:
        self._by_process = {}
        for helper in self._helpers.values():
            for process in helper.processes:
                self._by_process.setdefault(process, []).append(helper)
