"""Prints what keeps a job's reads waiting or makes them fail, from the daemon's list of troubles.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.messages import Trouble
from cachefs.publishing import clock
from cachefs.publishing.run_record import MAX_TROUBLES, TroubleRecord, is_first_to_print
from cachefs.trouble_texts import (
    SEE_ERRORS,
    Cause,
    describe_end,
    describe_past,
    describe_trouble,
    is_delaying,
    is_failing,
    trouble_key,
)

# System call number of Linux, the same on all architectures since Linux 5.6; `os` lacks the call.
_PIDFD_GETFD: Final = 438
_STDERR: Final = 2
# Minimum duration in seconds of a trouble that is printed: most pass sooner.
PRINT_AFTER_SECONDS: Final = 3.0
# Maximum number of lines of one training process: an origin that comes and goes must not fill a log.
MAX_LINES: Final = 20


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


@dataclass(slots=True)
class _TroubleState:
    """The state of one trouble of the job."""

    latest: Trouble
    is_printed: bool = False
    is_over: bool = False
    seconds: float = 0.0  # total of all its occurrences


class TroublePrinter:
    """Prints the troubles of one training process, which begins now. Times are unix times in seconds."""

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = clock.since_1970) -> None:
        """print_line: shows a line to the user, also while the training process waits."""
        self._print_line = print_line
        self._clock = clock
        self._began = clock()
        self._known: dict[tuple[str, str], _TroubleState] = {}
        self._lines = 0
        self._ended_at: dict[str, float] = {}  # by subject: when reads last ceased to wait for it

    @property
    def has_lasting_trouble(self) -> bool:
        """Whether any trouble lasts."""
        return any(not one.is_over and not is_failing(one.latest.cause) for one in self._known.values())

    def update_troubles(self, troubles: Sequence[Trouble]) -> None:
        """Update the troubles of the job to those present now."""
        now = self._clock()
        # An origin that is away does not concern the job as long as all its reads hit on the node.
        present = {(one.cause, one.subject): one for one in troubles if one.waiting or one.cause != Cause.ORIGIN}
        for key, before in self._known.items():
            if key not in present and not before.is_over and not is_failing(before.latest.cause):
                self._end_trouble(before, now)
        for key, trouble in present.items():
            known = self._known.get(key)
            if known is None and len(self._known) >= MAX_TROUBLES:
                continue
            if known is None:
                known = self._known[key] = _TroubleState(trouble)
            elif known.is_over:
                known.is_over = known.is_printed = False
            known.latest = trouble
            lasts = self._duration_of(known, now)
            if not known.is_printed and (lasts >= PRINT_AFTER_SECONDS or is_failing(trouble.cause)):
                known.is_printed = True
                self._print_once(*_begin_text(trouble, now))

    def make_records(self) -> list[TroubleRecord]:
        """Return all troubles that the job has met, for the summary of its run."""
        found, now = [], self._clock()
        for (cause, _), known in self._known.items():
            one = known.latest
            seconds = known.seconds + (0.0 if known.is_over else self._duration_of(known, now))
            if is_failing(cause) or known.is_printed or known.seconds >= PRINT_AFTER_SECONDS:
                waited = seconds if is_delaying(cause) else 0.0
                failed = one.failed - one.unattributed
                found.append(TroubleRecord(trouble_key(one), seconds, waited, failed, describe_past(one, seconds)))
        return found

    def _duration_of(self, known: _TroubleState, now: float) -> float:
        """Return the duration of the present occurrence, from the beginning of the job at the earliest."""
        # The cause of a wait may change: an origin that answers again is slow at first.
        return max(0.0, now - max(known.latest.since, self._began, self._ended_at.get(known.latest.subject, 0.0)))

    def _end_trouble(self, known: _TroubleState, now: float) -> None:
        known.is_over = True
        known.seconds += self._duration_of(known, now)
        if is_delaying(known.latest.cause):
            self._ended_at[known.latest.subject] = now
        if known.is_printed:
            self._print_once(describe_end(known.latest, now), f"{trouble_key(known.latest)} {now:.0f} over")

    def _print_once(self, line: str, key: str) -> None:
        if line and self._lines < MAX_LINES and is_first_to_print(key):
            self._lines += 1
            self._print_line(line)


def _begin_text(one: Trouble, now: float) -> tuple[str, str]:
    """Return the line about a trouble, and the key under which only one process of the run prints it. For failed reads,
    the process that dies of them uses the same line and key (cachefs.publishing.exit_summary)."""
    if is_failing(one.cause) and (one.failed or not one.waiting):
        return describe_past(one, 0.0), trouble_key(one)
    line = describe_trouble(one, now)
    key = f"{trouble_key(one)} {one.since:.0f}"
    return (f"{line}; {SEE_ERRORS}" if is_failing(one.cause) else line), key
