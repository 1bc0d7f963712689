"""How much memory the sequences of all jobs take, and may take: what jobs have published, and what plans make of it."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cachefs.errors import StoreFull
from cachefs.job_messages import SampleMap
from cachefs.planning.blocks.samples import Samples
from cachefs.sizes import format_size
from cachefs_daemon.jobs.owners import owner_of, owner_words

# Bytes per block of the snapshot that a plan takes for a consumer: its next reads, and those of two epochs.
PER_BLOCK: Final = 12
# Bytes per read of its samples: of two epochs, in order and by sample.
PER_READ: Final = 24
# Bytes that a path in a list takes besides its characters.
PER_PATH: Final = 48
# The part of all room that one user's jobs may take, but for the user that the daemon runs as.
USERS_PART: Final = 0.5


class Part(Enum):
    """What a consumer takes room for."""

    PLAN = auto()
    ORDERS = auto()  # that it has published, and may still read


@dataclass(slots=True)
class _Held:
    """A sample map that somebody holds."""

    sample_map: SampleMap  # so that its id is no other's
    size: int  # bytes
    owner: str  # who has published it
    holders: int = 0


class PlanRoom:
    """Whoever cannot get room has no plan; its reads are served all the same. Used from the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._taken: dict[tuple[str, Part], int] = {}  # bytes, by key of the consumer and for what
        self._maps: dict[int, _Held] = {}  # by id: however many hold one, it takes room once
        self._sum = 0  # bytes, of both
        self._by_owner: Counter[str] = Counter()  # the same, by `owner_of` of their jobs

    @property
    def taken(self) -> int:
        """Bytes."""
        return self._sum

    def take(self, consumer: str, part: Part, size: int) -> None:
        """The consumer with that key, which begins with its job's full name and a slash, takes *size* bytes for that,
        in place of what it has taken before. Raises StoreFull."""
        before = self._taken.get((consumer, part), 0)
        owner = _owner(consumer)
        if size > before:
            self._check(size, before, owner)
        self._taken[consumer, part] = size
        self._count(size - before, owner)

    def give_back(self, consumer: str, *parts: Part) -> None:
        """The consumer with that key does not need these any more; all where none is named. Unknown keys are
        ignored."""
        for part in parts or Part:
            self._count(-self._taken.pop((consumer, part), 0), _owner(consumer))

    def hold(self, sample_map: SampleMap, job: str) -> None:
        """Somebody, or somebody more, of the job of that full name holds this very map. Raises StoreFull."""
        held = self._maps.get(id(sample_map))
        if held is None:
            held = _Held(sample_map, _size_of(sample_map), owner_of(job))
            self._check(held.size, 0, held.owner)
            self._maps[id(sample_map)] = held
            self._count(held.size, held.owner)
        held.holders += 1

    def release(self, sample_map: SampleMap) -> None:
        """One of its holders does not hold it any more."""
        held = self._maps[id(sample_map)]
        held.holders -= 1
        if not held.holders:
            del self._maps[id(sample_map)]
            self._count(-held.size, held.owner)

    @contextlib.contextmanager
    def holding(self, job: str, *maps: SampleMap) -> Iterator[None]:
        """They are held meanwhile, so that nobody who holds one of them then fails. Raises StoreFull."""
        with contextlib.ExitStack() as releasing:
            for one in maps:
                self.hold(one, job)
                releasing.callback(self.release, one)
            yield

    def _count(self, size: int, owner: str) -> None:
        self._sum += size
        self._by_owner[owner] += size
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _check(self, size: int, before: int, owner: str) -> None:
        """before: bytes in whose place *size* are taken. Raises StoreFull."""
        others, limit = self._by_owner[owner] - before, int(self._limit * USERS_PART)
        if owner and others + size > limit:
            raise StoreFull(
                f"no memory for its plan: it would take {format_size(size)}, and what jobs of {owner_words(owner)} "
                f"have published and their plans take {format_size(others)} of {format_size(limit)}; end jobs that "
                "are over (`cachectl job cancel`)"
            )
        others = self._sum - before
        if others + size > self._limit:
            raise StoreFull(
                f"no memory for its plan: it would take {format_size(size)}, and what jobs have published and their "
                f"plans take {format_size(others)} of {format_size(self._limit)}; end jobs that are over "
                "(`cachectl job cancel`)"
            )


def _owner(consumer: str) -> str:
    """Whose the consumer with that key is."""
    return owner_of(consumer.partition("/")[0])


def plan_size(samples: Samples, reads: int = 0) -> int:
    """Bytes that the plan of a consumer takes. reads: of the longest epoch that is in the plan."""
    return PER_BLOCK * samples.space.count + PER_READ * max(len(samples.ids), len(samples), reads)


def _size_of(sample_map: SampleMap) -> int:
    numbers = len(sample_map.entries) + len(sample_map.offsets) + len(sample_map.lengths)
    return numbers + sum(map(len, sample_map.paths)) + PER_PATH * len(sample_map.paths)
