"""The backoff of blocks that could not be fetched a moment ago."""

from collections.abc import KeysView
from typing import Final

from cachefs.planning.prefetch.lookahead import Name

# Seconds until a block that no tier took is requested again.
AFTER_REFUSAL: Final = 1.0
# Bounds of the seconds until a block that could not be fetched is requested again.
SHORTEST_AFTER_FAILURE: Final = 1.0
LONGEST_AFTER_FAILURE: Final = 30.0
_GROWTH: Final = 1.1


class Pauses:
    """The pauses of blocks. Consecutive failures lengthen the pauses of further failures, until a fetch succeeds."""

    def __init__(self) -> None:
        self._until: dict[Name, float] = {}  # end of each pause, in monotonic seconds
        self._after_failure = SHORTEST_AFTER_FAILURE  # pause of the next failing block, in seconds

    @property
    def names(self) -> KeysView[Name]:
        """Blocks that pause, as of the last `end`."""
        return self._until.keys()

    def refused(self, name: Name, now: float) -> None:
        """Pause a block that no tier took, as it would have been evicted for one that is needed sooner."""
        self._until[name] = now + AFTER_REFUSAL

    def failed(self, name: Name, now: float) -> None:
        """Pause a block that could not be fetched."""
        self._until[name] = now + self._after_failure
        self._after_failure = min(LONGEST_AFTER_FAILURE, _GROWTH * self._after_failure)

    def succeeded(self) -> None:
        """Reset the backoff after a successful fetch: the origins work again."""
        self._after_failure = SHORTEST_AFTER_FAILURE

    def end(self, now: float) -> None:
        """Forget the pauses that are over at *now*."""
        self._until = {name: until for name, until in self._until.items() if until > now}
