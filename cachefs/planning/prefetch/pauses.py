"""Which blocks are not asked for again just yet, since they could not be had a moment ago."""

from collections.abc import KeysView
from typing import Final

from cachefs.planning.prefetch.lookahead import Name

# Seconds after which a block that no tier took is asked for again.
AFTER_REFUSAL: Final = 1.0
# Seconds after which a block that could not be fetched is asked for again: the bounds.
SHORTEST_AFTER_FAILURE: Final = 1.0
LONGEST_AFTER_FAILURE: Final = 30.0
_GROWTH: Final = 1.1


class Pauses:
    """Failures that follow each other lengthen the pauses of the blocks that fail, until one fetch succeeds."""

    def __init__(self) -> None:
        self._until: dict[Name, float] = {}  # when each pause ends, in monotonic seconds
        self._after_failure = SHORTEST_AFTER_FAILURE  # seconds that the next block that fails will pause

    @property
    def names(self) -> KeysView[Name]:
        """Blocks that pause, as of the last `end`."""
        return self._until.keys()

    def refused(self, name: Name, now: float) -> None:
        """No tier took the block: it was about to be evicted for one that is needed sooner."""
        self._until[name] = now + AFTER_REFUSAL

    def failed(self, name: Name, now: float) -> None:
        """The block could not be fetched."""
        self._until[name] = now + self._after_failure
        self._after_failure = min(LONGEST_AFTER_FAILURE, _GROWTH * self._after_failure)

    def succeeded(self) -> None:
        """A block has come, so the origins work again."""
        self._after_failure = SHORTEST_AFTER_FAILURE

    def end(self, now: float) -> None:
        """Forget the pauses that are over at *now*."""
        self._until = {name: until for name, until in self._until.items() if until > now}
