"""Prints what keeps a job's reads waiting or makes them fail, from the daemon's list of troubles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.messages import Trouble
from cachefs.publishing import clock
from cachefs.publishing.run_record import MOST_TROUBLES, TroubleRecord, is_first_to_say
from cachefs.troubles import SEE_ERRORS, Cause, is_failing, is_of_reads, key_of, over_words, past_words, words

# Minimum duration in seconds of a trouble that is printed: most pass sooner.
TOLD_AFTER: Final = 3.0
# Maximum number of lines of one training process: an origin that comes and goes must not fill a log.
MOST_LINES: Final = 20


@dataclass(slots=True)
class _Known:
    """The state of one trouble of the job."""

    latest: Trouble
    is_told: bool = False
    is_over: bool = False
    seconds: float = 0.0  # total of all its occurrences


class TroubleLines:
    """Prints the troubles of one training process, which begins now. Times are unix times in seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = clock.since_1970) -> None:
        """say: shows a line to the user, also while the training process waits."""
        self._say = say
        self._clock = clock
        self._began = clock()
        self._known: dict[tuple[str, str], _Known] = {}
        self._lines = 0
        self._over: dict[str, float] = {}  # by subject: when reads last ceased to wait for it

    @property
    def has_any(self) -> bool:
        """Whether any trouble lasts."""
        return any(not one.is_over and not is_failing(one.latest.cause) for one in self._known.values())

    def see(self, troubles: Sequence[Trouble]) -> None:
        """Update the troubles of the job to those present now."""
        now = self._clock()
        # An origin that is away does not concern the job as long as all its reads hit on the node.
        present = {(one.cause, one.subject): one for one in troubles if one.waiting or one.cause != Cause.ORIGIN}
        for key, before in self._known.items():
            if key not in present and not before.is_over and not is_failing(before.latest.cause):
                self._end(before, now)
        for key, trouble in present.items():
            known = self._known.get(key)
            if known is None and len(self._known) >= MOST_TROUBLES:
                continue
            if known is None:
                known = self._known[key] = _Known(trouble)
            elif known.is_over:
                known.is_over = known.is_told = False
            known.latest = trouble
            lasts = self._lasts(known, now)
            if not known.is_told and (lasts >= TOLD_AFTER or is_failing(trouble.cause)):
                known.is_told = True
                self._tell(*_begin_words(trouble, now))

    def records(self) -> list[TroubleRecord]:
        """Return all troubles that the job has met, for the summary of its run."""
        found, now = [], self._clock()
        for (cause, _), known in self._known.items():
            one = known.latest
            seconds = known.seconds + (0.0 if known.is_over else self._lasts(known, now))
            if is_failing(cause) or known.is_told or known.seconds >= TOLD_AFTER:
                waited = seconds if is_of_reads(cause) else 0.0
                failed = one.failed - one.unattributed
                found.append(TroubleRecord(key_of(one), seconds, waited, failed, past_words(one, seconds)))
        return found

    def _lasts(self, known: _Known, now: float) -> float:
        """Return the duration of the present occurrence, from the beginning of the job at the earliest."""
        # The cause of a wait may change: an origin that answers again is slow at first.
        return max(0.0, now - max(known.latest.since, self._began, self._over.get(known.latest.subject, 0.0)))

    def _end(self, known: _Known, now: float) -> None:
        known.is_over = True
        known.seconds += self._lasts(known, now)
        if is_of_reads(known.latest.cause):
            self._over[known.latest.subject] = now
        if known.is_told:
            self._tell(over_words(known.latest, now), f"{key_of(known.latest)} {now:.0f} over")

    def _tell(self, line: str, key: str) -> None:
        if line and self._lines < MOST_LINES and is_first_to_say(key):
            self._lines += 1
            self._say(line)


def _begin_words(one: Trouble, now: float) -> tuple[str, str]:
    """Return the line about a trouble, and the key under which only one process of the run prints it. For failed reads,
    the process that dies of them uses the same line and key (cachefs.publishing.last_words)."""
    if is_failing(one.cause) and (one.failed or not one.waiting):
        return past_words(one, 0.0), key_of(one)
    line = words(one, now)
    key = f"{key_of(one)} {one.since:.0f}"
    return (f"{line}; {SEE_ERRORS}" if is_failing(one.cause) else line), key
