"""How much memory the sequences of all jobs take, and may take: what jobs have published, and what plans make of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cachefs.errors import StoreFull
from cachefs.job_messages import SampleMap
from cachefs.planning.blocks.samples import Samples
from cachefs.sizes import format_size

# Bytes per block of the snapshot that a plan takes for a consumer: its next reads, and those of two epochs.
PER_BLOCK: Final = 12
# Bytes per read of its samples: of two epochs, in order and by sample.
PER_READ: Final = 24
# Bytes that a path in a list takes besides its characters.
PER_PATH: Final = 48


class Part(Enum):
    """What a consumer takes room for."""

    PLAN = auto()
    ORDERS = auto()  # that it has published, and may still read


@dataclass(slots=True)
class _Held:
    """A sample map that somebody holds."""

    sample_map: SampleMap  # so that its id is no other's
    size: int  # bytes
    holders: int = 0


class PlanRoom:
    """Whoever cannot get room has no plan; its reads are served all the same. Used from the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._taken: dict[tuple[str, Part], int] = {}  # bytes, by key of the consumer and for what
        self._maps: dict[int, _Held] = {}  # by id: however many hold one, it takes room once
        self._sum = 0  # bytes, of both

    @property
    def taken(self) -> int:
        """Bytes."""
        return self._sum

    def take(self, consumer: str, part: Part, size: int) -> None:
        """The consumer with that key takes *size* bytes for that, in place of what it has taken before. Raises
        StoreFull."""
        before = self._taken.get((consumer, part), 0)
        if size > before:
            self._check(size, self._sum - before)
        self._taken[consumer, part] = size
        self._sum += size - before

    def give_back(self, consumer: str, *parts: Part) -> None:
        """The consumer with that key does not need these any more; all where none is named. Unknown keys are
        ignored."""
        for part in parts or Part:
            self._sum -= self._taken.pop((consumer, part), 0)

    def hold(self, sample_map: SampleMap) -> None:
        """Somebody, or somebody more, holds this very map. Raises StoreFull."""
        held = self._maps.get(id(sample_map))
        if held is None:
            held = _Held(sample_map, _size_of(sample_map))
            self._check(held.size, self._sum)
            self._maps[id(sample_map)] = held
            self._sum += held.size
        held.holders += 1

    def release(self, sample_map: SampleMap) -> None:
        """One of its holders does not hold it any more."""
        held = self._maps[id(sample_map)]
        held.holders -= 1
        if not held.holders:
            del self._maps[id(sample_map)]
            self._sum -= held.size

    @contextlib.contextmanager
    def holding(self, *maps: SampleMap) -> Iterator[None]:
        """They are held meanwhile, so that nobody who holds one of them then fails. Raises StoreFull."""
        with contextlib.ExitStack() as releasing:
            for one in maps:
                self.hold(one)
                releasing.callback(self.release, one)
            yield

    def _check(self, size: int, others: int) -> None:
        if others + size > self._limit:
            raise StoreFull(
                f"no memory for its plan: it would take {format_size(size)}, and what jobs have published and their "
                f"plans take {format_size(others)} of {format_size(self._limit)}; end jobs that are over "
                "(`cachectl job cancel`)"
            )


def plan_size(samples: Samples, reads: int = 0) -> int:
    """Bytes that the plan of a consumer takes. reads: of the longest epoch that is in the plan."""
    return PER_BLOCK * samples.space.count + PER_READ * max(len(samples.ids), len(samples), reads)


def _size_of(sample_map: SampleMap) -> int:
    numbers = len(sample_map.entries) + len(sample_map.offsets) + len(sample_map.lengths)
    return numbers + sum(map(len, sample_map.paths)) + PER_PATH * len(sample_map.paths)
