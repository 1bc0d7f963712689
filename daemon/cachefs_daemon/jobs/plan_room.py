"""How much memory the sequences of all jobs take, and may take."""

from typing import Final

from cachefs.errors import StoreFull
from cachefs.planning.blocks.samples import Samples
from cachefs.sizes import format_size

# Bytes per block of the snapshot that a plan takes for a consumer: its next reads, and those of two epochs.
PER_BLOCK: Final = 12
# Bytes per read of its samples: of two epochs, in order and by sample.
PER_READ: Final = 24


class PlanRoom:
    """Whoever cannot get room has no plan; its reads are served all the same."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._taken: dict[str, int] = {}  # bytes, by key of the consumer

    def take(self, consumer: str, samples: Samples) -> None:
        """The consumer with that key takes room for a plan of *samples*. Raises StoreFull."""
        size = PER_BLOCK * samples.space.count + PER_READ * len(samples.ids)
        taken = sum(self._taken.values()) - self._taken.get(consumer, 0)
        if taken + size > self._limit:
            raise StoreFull(
                f"no memory for its plan: it would take {format_size(size)}, and the plans of other consumers take "
                f"{format_size(taken)} of {format_size(self._limit)}; end jobs that are over (`cachectl job cancel`)"
            )
        self._taken[consumer] = size

    def give_back(self, consumer: str) -> None:
        """The consumer with that key has no plan any more. Unknown keys are ignored."""
        self._taken.pop(consumer, None)
