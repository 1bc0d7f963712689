"""Records failures: kept for `cachectl errors`, and logged at a limited rate.

With an unreachable origin thousands of reads fail in a minute. In a minute each subject is logged once at most, each
cause LINES_PER_CAUSE times, and all together LINES_PER_MINUTE times. Other failures are counted.
"""

import itertools
import logging
import re
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from cachefs.formatting import format_count
from cachefs.messages import ErrorCause, ErrorView

MAX_CAUSES: Final = 50  # causes
# Stands in a message for the thing that failed.
PLACEHOLDER: Final = "…"
# Parts that differ between failures of one cause: long numbers, and names made of digits.
_VARIABLE_PART: Final = re.compile(r"\b(?:[0-9a-f]{12,}|\d{4,})\b")
_URL: Final = re.compile(r"[a-z][a-z0-9]*://[^/]*")
log = logging.getLogger(__name__)

MAX_SUBJECTS: Final = 200  # subjects
LOG_SECONDS: Final = 60.0  # seconds between two lines about the same subject
LINES_PER_MINUTE: Final = 60
LINES_PER_CAUSE: Final = 3


@dataclass(slots=True)
class _Cause:
    # Unix time of the first and of the last failure.
    first: float
    last: float
    # The last failure's subject and message.
    subject: str
    message: str
    # Failures so far.
    count: int = 0
    # The common prefix of all subjects, up to a slash.
    common: str = ""
    # True where all failures have one subject.
    is_single: bool = True


class ErrorCauses:
    """The last MAX_CAUSES causes. Used from the event loop only."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, str], _Cause] = OrderedDict()  # oldest first

    def add(self, subject: str, message: str, when: float) -> None:
        """Count a failure at this unix time."""
        key = cause_key(subject, message)
        cause = self._causes.pop(key, None) or _Cause(when, when, subject, message, common=subject)
        cause.is_single = cause.is_single and cause.subject == subject
        cause.common = _common_prefix(cause.common, subject)
        cause.subject, cause.message, cause.last = subject, message, when
        cause.count += 1
        self._causes[key] = cause
        if len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)

    def note_ongoing(self, subject: str, message: str, when: float) -> None:
        """Record that a failure still lasts at this unix time."""
        cause = self._causes.get(cause_key(subject, message))
        if cause is not None:
            cause.last = when

    def views(self) -> list[ErrorCause]:
        """Return the causes, the latest first."""
        return [
            ErrorCause(
                first=one.first,
                last=one.last,
                count=one.count,
                where=one.common,
                message=one.message if one.is_single else without_subject(one.subject, one.message),
                example=one.subject,
            )
            for one in reversed(self._causes.values())
        ]


def cause_key(subject: str, message: str) -> tuple[str, str]:
    """Return the key that all failures of one cause share."""
    return cause_area(subject), _VARIABLE_PART.sub(PLACEHOLDER, without_subject(subject, message))


def _common_prefix(one: str, other: str) -> str:
    """Return the common prefix, up to a slash; all of it where both are the same."""
    if one == other:
        return one
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    parts = [left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "/".join([*parts, ""]) or one


def cause_area(subject: str) -> str:
    """Return the part that subjects of one cause have in common: of a URL the server or bucket."""
    url = _URL.match(subject)
    return url[0] if url is not None else subject


def without_subject(subject: str, message: str) -> str:
    """Return the message with PLACEHOLDER in place of the subject, in whatever form it is named there."""
    key = subject.removeprefix(cause_area(subject))
    for name in (subject, key, key.lstrip("/")):
        if len(name) > 1:
            message = message.replace(name, PLACEHOLDER)
    return message


@dataclass(slots=True)
class _Failure:
    # Text of the last failure.
    message: str
    # Unix time of the last failure, and of the first.
    when: float
    first: float
    # Failures so far.
    count: int = 0
    # Monotonic seconds when it was last logged.
    logged_at: float = field(default=float("-inf"))


class ErrorLog:
    """The last MAX_SUBJECTS subjects that failed. Used from the event loop only."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, _Failure] = OrderedDict()  # by subject, oldest first
        self._causes = ErrorCauses()
        self._minute_began = float("-inf")  # monotonic seconds when the current minute began
        self._lines = 0  # logged in this minute
        self._lines_by_cause: Counter[tuple[str, str]] = Counter()  # the same by cause
        self.count = 0  # failures since the daemon started
        self._suppressed = 0  # lines of this minute that were too many

    def add(self, subject: str, message: str, bug: BaseException | None = None) -> None:
        """Record a failure. bug: an unexpected exception, whose traceback is logged."""
        failure = self._failures.pop(subject, None) or _Failure(message, time.time(), time.time())
        failure.message, failure.when = message, time.time()
        failure.count += 1
        self.count += 1
        self._causes.add(subject, message, failure.when)
        self._failures[subject] = failure
        if len(self._failures) > MAX_SUBJECTS:
            self._failures.popitem(last=False)
        now = time.monotonic()
        if now - failure.logged_at >= LOG_SECONDS and self._may_log(cause_key(subject, message), now):
            failure.logged_at = now
            times = f" ({failure.count} times by now)" if failure.count > 1 else ""
            text = message if subject in message else f"{subject}: {message}"
            log.warning("%s%s", text, times, exc_info=bug)

    def views(self) -> list[ErrorView]:
        """Return the failures, newest first."""
        return [
            ErrorView(
                when=failure.when, first=failure.first, count=failure.count, subject=subject, message=failure.message
            )
            for subject, failure in reversed(self._failures.items())
        ]

    def causes(self) -> list[ErrorCause]:
        """Return the failures by cause, newest first."""
        return self._causes.views()

    def note_ongoing(self, subject: str) -> None:
        """Record that the last failure of this subject still lasts."""
        failure = self._failures.get(subject)
        if failure is not None:
            failure.when = time.time()
            self._causes.note_ongoing(subject, failure.message, failure.when)

    def _may_log(self, cause: tuple[str, str], now: float) -> bool:
        if now - self._minute_began >= LOG_SECONDS:
            if self._suppressed:
                log.warning(
                    "%s in the last minute; see `cachectl errors`", format_count(self._suppressed, "more failure")
                )
            self._minute_began, self._lines, self._suppressed = now, 0, 0
            self._lines_by_cause.clear()
        if self._lines >= LINES_PER_MINUTE or self._lines_by_cause[cause] >= LINES_PER_CAUSE:
            self._suppressed += 1
            return False
        self._lines += 1
        self._lines_by_cause[cause] += 1
        return True
