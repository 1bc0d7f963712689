"""Counts stalls, by consumer and source: reads that found their bytes not on the node, or not yet in memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cachefs.job_messages import StallRow

# Rows that are kept: those of the epochs that began last.
MAX_ROWS: Final = 10_000
# Consumers of one job whose sums are kept; the oldest are dropped first.
MAX_CONSUMERS: Final = 10_000


@dataclass(slots=True)
class _Total:
    count: int = 0
    seconds: float = 0.0  # of all of them together
    longest: float = 0.0  # seconds


class Stalls:
    """All stalls since the daemon started."""

    def __init__(self) -> None:
        # Totals by job ("": the reader had published nothing), consumer, epoch and source.
        self._totals: dict[tuple[str, str, int, str], _Total] = {}
        # Totals by job: searching all rows for each of 1,000 jobs would take seconds.
        self._of_jobs: dict[str, _Total] = {}
        # Seconds of a job's consumers, by kind of source.
        self._of_consumers: dict[str, dict[str, dict[str, float]]] = {}
        # Totals by kind of source, of all jobs, including forgotten ones.
        self._of_sources: dict[str, _Total] = {}

    def count_stall(self, job: str, consumer: str, epoch: int, source: str, seconds: float) -> None:
        """Count a read that waited."""
        row = self._totals.setdefault((job, consumer, epoch, source), _Total())
        if len(self._totals) > MAX_ROWS:
            del self._totals[next(iter(self._totals))]
        kind_of_source = source.partition(" ")[0]
        kind = self._of_sources.setdefault(kind_of_source, _Total())
        if job:
            consumers = self._of_consumers.setdefault(job, {})
            if consumer not in consumers and len(consumers) >= MAX_CONSUMERS:
                del consumers[next(iter(consumers))]
            kinds = consumers.setdefault(consumer, {})
            kinds[kind_of_source] = kinds.get(kind_of_source, 0.0) + seconds
        for total in row, self._of_jobs.setdefault(job, _Total()), kind:
            total.count += 1
            total.seconds += seconds
            total.longest = max(total.longest, seconds)

    def stall_rows(self, job: str = "") -> list[StallRow]:
        """Return the stalls of one job; without one, those of all jobs, and of readers that have published nothing."""
        return [
            StallRow(
                job=name[0], consumer=name[1], epoch=name[2], source=name[3],
                count=total.count, seconds=total.seconds, longest=total.longest,
            )
            for name, total in sorted(one for one in self._totals.items() if not job or one[0][0] == job)
        ]  # fmt: skip

    def waited_of_job(self, job: str) -> tuple[int, float]:
        """Return how many reads of a job waited, and for how many seconds altogether."""
        total = self._of_jobs.get(job, _Total())
        return total.count, total.seconds

    def seconds_of_consumers(self, job: str) -> Mapping[str, dict[str, float]]:
        """Return the seconds that a job's reads have waited, by consumer and kind of source (see totals_of_sources)."""
        return self._of_consumers.get(job, {})

    def totals_of_sources(self) -> dict[str, tuple[int, float]]:
        """Return, by kind of source (`origin`, `ssd`, `daemon` or `peer`), how many reads have waited since the daemon
        started, and for how many seconds altogether."""
        return {source: (total.count, total.seconds) for source, total in self._of_sources.items()}

    def forget(self, job: str) -> None:
        """Forget a job that is no longer shown."""
        self._of_jobs.pop(job, None)
        self._of_consumers.pop(job, None)
        for name in [name for name in self._totals if name[0] == job]:
            del self._totals[name]


def merge_rows(rows: Iterable[StallRow]) -> list[StallRow]:
    """Return the rows in order, merged to one row for each job, consumer, epoch and source."""
    found: dict[tuple[str, str, int, str], StallRow] = {}
    for one in rows:
        key = (one.job, one.consumer, one.epoch, one.source)
        if (known := found.get(key)) is not None:
            one = StallRow(
                *key,
                known.count + one.count,
                known.seconds + one.seconds,
                max(known.longest, one.longest),
                known.waiting + one.waiting,
            )
        found[key] = one
    return [found[key] for key in sorted(found)]
