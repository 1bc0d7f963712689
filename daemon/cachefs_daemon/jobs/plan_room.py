"""Limits the memory that the plans of all jobs take: what jobs have published, and what plans derive from it."""

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

# Bytes per block of the snapshot that a consumer's plan takes: its next reads, and those of two epochs.
PER_BLOCK: Final = 12
# Bytes per read of its samples: of two epochs, in order and by sample.
PER_READ: Final = 24
# Bytes that a path in a list takes besides its characters.
PER_PATH: Final = 48
# The share of all plan memory that the jobs of one user may take, except the user that the daemon runs as.
USERS_PART: Final = 0.5


class Part(Enum):
    """The purposes for which a consumer takes plan memory."""

    PLAN = auto()
    ORDERS = auto()  # published, and still to be read


@dataclass(slots=True)
class _Held:
    sample_map: SampleMap  # a reference, so that no other object gets its id
    size: int  # bytes
    owner: str  # owner of the job that published it
    holders: int = 0


class PlanRoom:
    """Limits plan memory. Reads of a consumer without a plan are served all the same. Used from the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._taken: dict[tuple[str, Part], int] = {}  # bytes, by key of the consumer and purpose
        self._maps: dict[int, _Held] = {}  # by id: each map counts once, however many consumers hold it
        self._sum = 0  # bytes of all of these
        self._by_owner: Counter[str] = Counter()  # the same, by `owner_of` the job

    @property
    def taken(self) -> int:
        """Bytes in use by all plans and sample maps."""
        return self._sum

    def take(self, consumer: str, part: Part, size: int) -> None:
        """Reserve *size* bytes for a purpose of a consumer, instead of its previous amount. The consumer's key begins
        with its job's full name and a slash. Raises StoreFull."""
        before = self._taken.get((consumer, part), 0)
        owner = _owner(consumer)
        if size > before:
            self._check(size, before, owner)
        self._taken[consumer, part] = size
        self._count(size - before, owner)

    def give_back(self, consumer: str, *parts: Part) -> None:
        """Release a consumer's memory for these purposes, or for all. Unknown keys are ignored."""
        for part in parts or Part:
            self._count(-self._taken.pop((consumer, part), 0), _owner(consumer))

    def hold(self, sample_map: SampleMap, job: str) -> None:
        """Count one more holder of this map object, for a job of that full name. Raises StoreFull."""
        held = self._maps.get(id(sample_map))
        if held is None:
            held = _Held(sample_map, _size_of(sample_map), owner_of(job))
            self._check(held.size, 0, held.owner)
            self._maps[id(sample_map)] = held
            self._count(held.size, held.owner)
        held.holders += 1

    def release(self, sample_map: SampleMap) -> None:
        """Release one hold of the map; the last one frees its memory."""
        held = self._maps[id(sample_map)]
        held.holders -= 1
        if not held.holders:
            del self._maps[id(sample_map)]
            self._count(-held.size, held.owner)

    @contextlib.contextmanager
    def holding(self, job: str, *maps: SampleMap) -> Iterator[None]:
        """Hold the maps during the context, so that holding one of them again cannot fail. Raises StoreFull."""
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
        """before: bytes that *size* replaces. Raises StoreFull."""
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
    return owner_of(consumer.partition("/")[0])


def plan_size(samples: Samples, reads: int = 0) -> int:
    """Return the bytes that a consumer's plan takes. reads: of the longest epoch in the plan."""
    return PER_BLOCK * samples.space.count + PER_READ * max(len(samples.ids), len(samples), reads)


def _size_of(sample_map: SampleMap) -> int:
    numbers = len(sample_map.entries) + len(sample_map.offsets) + len(sample_map.lengths)
    return numbers + sum(map(len, sample_map.paths)) + PER_PATH * len(sample_map.paths)
