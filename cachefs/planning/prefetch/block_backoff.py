"""The backoff of blocks that could not be fetched a moment ago."""

from collections.abc import KeysView
from typing import Final

from cachefs.planning.prefetch.lookahead import BlockName

# Seconds until a block that no tier took is requested again.
REFUSED_SECONDS: Final = 1.0
# Bounds of the seconds until a block that could not be fetched is requested again.
MIN_FAILED_SECONDS: Final = 1.0
MAX_FAILED_SECONDS: Final = 30.0
_GROWTH: Final = 1.1


class BlockBackoff:
    """The pauses of blocks. Consecutive failures lengthen the pauses of further failures, until a fetch succeeds."""

    def __init__(self) -> None:
        self._until: dict[BlockName, float] = {}  # end of each pause, in monotonic seconds
        self._after_failure = MIN_FAILED_SECONDS  # pause of the next failing block, in seconds

    @property
    def paused(self) -> KeysView[BlockName]:
        """Blocks that pause, as of the last `forget_expired`."""
        return self._until.keys()

    def pause_refused(self, name: BlockName, now: float) -> None:
        """Pause a block that no tier took, as it would have been evicted for one that is needed sooner."""
        self._until[name] = now + REFUSED_SECONDS

    def pause_failed(self, name: BlockName, now: float) -> None:
        """Pause a block that could not be fetched."""
        self._until[name] = now + self._after_failure
        self._after_failure = min(MAX_FAILED_SECONDS, _GROWTH * self._after_failure)

    def reset(self) -> None:
        """Reset the backoff after a successful fetch: the origins work again."""
        self._after_failure = MIN_FAILED_SECONDS

    def forget_expired(self, now: float) -> None:
        """Forget the pauses that are over at *now*."""
        self._until = {name: until for name, until in self._until.items() if until > now}
