"""Detects troubles of a tier: a disk that is full, broken or does not answer."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cachefs.sizes import format_size
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.store.storage import TierUsage

# A tier always keeps a little of its budget back.
_FULL_FRACTION: Final = 0.95
# A tier that was full remains so until it uses less than this part of its limit: it evicts a whole segment at once.
_STILL_FULL_FRACTION: Final = 0.5


@dataclass(frozen=True, slots=True)
class TierTrouble:
    """A present trouble of one tier."""

    tier: str
    # Its kind; its text; and unix time in seconds of the first look that found it.
    kind: str
    text: str
    since: float


class TierTroubles:
    """Adds each trouble to the log of failures once, and keeps it current while it lasts. Used on the event loop."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._known: dict[str, TierTrouble] = {}  # by tier

    @property
    def current(self) -> list[TierTrouble]:
        """The troubles that the last look found."""
        return list(self._known.values())

    def check_tiers(self, tiers: Iterable[TierUsage]) -> None:
        """Check the tiers. Call every second or so."""
        for tier in tiers:
            before = self._known.pop(tier.name, None)
            kind, text = trouble_of(tier, _STILL_FULL_FRACTION if before is not None else _FULL_FRACTION)
            if not kind:
                continue
            subject = f"{tier.name} tier"
            if before is not None and before.kind == kind:
                self._errors.note_ongoing(subject)
            else:
                self._errors.add(subject, text)
            since = before.since if before is not None else time.time()
            self._known[tier.name] = TierTrouble(tier.name, kind, text, since)


def trouble_of(tier: TierUsage, full: float = _FULL_FRACTION) -> tuple[str, str]:
    """Return the kind of trouble and its text; both "" where there is none. full: the part of its limit that a full
    tier uses."""
    if tier.problem:
        return tier.problem, f"takes no new blocks: {tier.problem}"
    if tier.limit < _FULL_FRACTION * tier.budget and tier.used >= full * tier.limit:
        return "full", (
            f"has no more room: {format_size(max(0, tier.limit))} of its budget of {format_size(tier.budget)} can be "
            f"used, as other programs have taken the rest of the file system of {tier.directory}"
        )
    return "", ""
