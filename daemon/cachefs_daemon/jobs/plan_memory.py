"""Limits the memory that the plans of all jobs take: what jobs have published, and what plans derive from it."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cachefs.errors import StoreFull
from cachefs.job_messages import SampleMap
from cachefs.planning.blocks.space import Samples
from cachefs.sizes import format_size
from cachefs_daemon.jobs.owners import owner_of, owner_text

# Bytes per block of the snapshot that a consumer's plan takes: its next reads, and those of two epochs.
BYTES_PER_BLOCK: Final = 12
# Bytes per read of its samples: of two epochs, in order and by sample.
BYTES_PER_READ: Final = 24
# Bytes that a path in a list takes besides its characters.
BYTES_PER_PATH: Final = 48
# The share of all plan memory that the jobs of one user may take, except the user that the daemon runs as.
MAX_USER_SHARE: Final = 0.5


class PlanPurpose(Enum):
    """The purposes for which a consumer takes plan memory."""

    PLAN = auto()
    ORDERS = auto()  # published, and still to be read


@dataclass(slots=True)
class _CountedMap:
    sample_map: SampleMap  # a reference, so that no other object gets its id
    size: int  # bytes
    owner: str  # owner of the job that published it
    holder_count: int = 0


class PlanMemory:
    """Limits plan memory. Reads of a consumer without a plan are served all the same. Used from the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self._reserved: dict[tuple[str, PlanPurpose], int] = {}  # bytes, by key of the consumer and purpose
        self._maps: dict[int, _CountedMap] = {}  # by id: each map counts once, however many consumers hold it
        self._sum = 0  # bytes of all of these
        self._by_owner: Counter[str] = Counter()  # the same, by `owner_of` the job

    @property
    def used(self) -> int:
        """Bytes in use by all plans and sample maps."""
        return self._sum

    def reserve(self, consumer: str, purpose: PlanPurpose, size: int) -> None:
        """Reserve *size* bytes for a purpose of a consumer, instead of its previous amount. The consumer's key begins
        with its job's full name and a slash. Raises StoreFull."""
        before = self._reserved.get((consumer, purpose), 0)
        owner = _owner_of_consumer(consumer)
        if size > before:
            self._check_limits(size, before, owner)
        self._reserved[consumer, purpose] = size
        self._count_bytes(size - before, owner)

    def release_consumer(self, consumer: str, *purposes: PlanPurpose) -> None:
        """Release a consumer's memory for these purposes, or for all. Unknown keys are ignored."""
        for part in purposes or PlanPurpose:
            self._count_bytes(-self._reserved.pop((consumer, part), 0), _owner_of_consumer(consumer))

    def hold_map(self, sample_map: SampleMap, job: str) -> None:
        """Count one more holder of this map object, for a job of that full name. Raises StoreFull."""
        counted = self._maps.get(id(sample_map))
        if counted is None:
            counted = _CountedMap(sample_map, _map_size(sample_map), owner_of(job))
            self._check_limits(counted.size, 0, counted.owner)
            self._maps[id(sample_map)] = counted
            self._count_bytes(counted.size, counted.owner)
        counted.holder_count += 1

    def release_map(self, sample_map: SampleMap) -> None:
        """Release one hold of the map; the last one frees its memory."""
        counted = self._maps[id(sample_map)]
        counted.holder_count -= 1
        if not counted.holder_count:
            del self._maps[id(sample_map)]
            self._count_bytes(-counted.size, counted.owner)

    @contextlib.contextmanager
    def hold_maps(self, job: str, *maps: SampleMap) -> Iterator[None]:
        """Hold the maps during the context, so that holding one of them again cannot fail. Raises StoreFull."""
        with contextlib.ExitStack() as releasing:
            for one in maps:
                self.hold_map(one, job)
                releasing.callback(self.release_map, one)
            yield

    def _count_bytes(self, size: int, owner: str) -> None:
        self._sum += size
        self._by_owner[owner] += size
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _check_limits(self, size: int, before: int, owner: str) -> None:
        """before: bytes that *size* replaces. Raises StoreFull."""
        others, limit = self._by_owner[owner] - before, int(self._limit * MAX_USER_SHARE)
        if owner and others + size > limit:
            raise StoreFull(
                f"no memory for its plan: it would take {format_size(size)}, and what jobs of {owner_text(owner)} "
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


def _owner_of_consumer(consumer: str) -> str:
    return owner_of(consumer.partition("/")[0])


def plan_bytes(samples: Samples, reads: int = 0) -> int:
    """Return the bytes that a consumer's plan takes. reads: of the longest epoch in the plan."""
    return BYTES_PER_BLOCK * samples.space.count + BYTES_PER_READ * max(len(samples.ids), len(samples), reads)


def _map_size(sample_map: SampleMap) -> int:
    numbers = len(sample_map.entries) + len(sample_map.offsets) + len(sample_map.lengths)
    return numbers + sum(map(len, sample_map.paths)) + BYTES_PER_PATH * len(sample_map.paths)
