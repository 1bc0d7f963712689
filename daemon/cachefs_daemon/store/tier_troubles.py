"""What is wrong with a tier, for the list of failures: a disk that is full, broken or does not answer."""

from collections.abc import Iterable
from typing import Final

from cachefs.sizes import format_size
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.store.storage import TierUsage

# A tier always keeps a little of its budget back.
_NEARLY: Final = 0.95


class TierTroubles:
    """Notes each trouble once, and that it lasts. Used on the event loop."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._kinds: dict[str, str] = {}  # by tier: which trouble it has

    def look(self, tiers: Iterable[TierUsage]) -> None:
        """To be called every second or so."""
        for tier in tiers:
            kind, text = trouble_of(tier)
            subject = f"{tier.name} tier"
            if kind and self._kinds.get(tier.name) == kind:
                self._errors.goes_on(subject)
            elif kind:
                self._errors.add(subject, text)
            self._kinds[tier.name] = kind


def trouble_of(tier: TierUsage) -> tuple[str, str]:
    """Kind of trouble and its text; both empty where there is none."""
    if tier.problem:
        return tier.problem, f"takes no new blocks: {tier.problem}"
    if tier.limit < _NEARLY * tier.budget and tier.used >= _NEARLY * tier.limit:
        return "full", (
            f"has no more room: {format_size(max(0, tier.limit))} of its budget of {format_size(tier.budget)} can be "
            f"used, as others have taken the rest of what {tier.directory} is on"
        )
    return "", ""
