"""Prints what keeps a job's reads waiting or makes them fail, from the daemon's list of troubles."""

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

# Minimum duration in seconds of a trouble that is printed: most pass sooner.
PRINT_AFTER_SECONDS: Final = 3.0
# Maximum number of lines of one training process: an origin that comes and goes must not fill a log.
MAX_LINES: Final = 20


@dataclass(slots=True)
class _TroubleState:
    """The state of one trouble of the job."""

    latest: Trouble
    is_printed: bool = False
    is_over: bool = False
    seconds: float = 0.0  # total of all its occurrences


class TroublePrinter:
    """Prints the troubles of one training process, which begins now. Times are unix times in seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = clock.since_1970) -> None:
        """say: shows a line to the user, also while the training process waits."""
        self._print_line = say
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
