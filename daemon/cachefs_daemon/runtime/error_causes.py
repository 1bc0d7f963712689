"""Groups failures by cause: one outage makes thousands of objects fail, and is one thing to repair."""

import itertools
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from cachefs.messages import ErrorCause

MAX_CAUSES: Final = 50  # causes
# Stands in a message for the thing that failed.
PLACEHOLDER: Final = "…"
# Parts that differ between failures of one cause: long numbers, and names made of digits.
_VARIABLE_PART: Final = re.compile(r"\b(?:[0-9a-f]{12,}|\d{4,})\b")
_URL: Final = re.compile(r"[a-z][a-z0-9]*://[^/]*")


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
