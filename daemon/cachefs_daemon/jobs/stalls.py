"""Who waited, for what, and how long: reads that found their bytes not on the node, or not yet in memory."""

from dataclasses import dataclass

from cachefs.job_messages import StallRow


@dataclass(slots=True)
class _Total:
    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0


class Stalls:
    """Kept by job (empty: nobody published what was read), consumer, epoch and source."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str, int, str], _Total] = {}

    def add(self, job: str, consumer: str, epoch: int, source: str, seconds: float) -> None:
        total = self._totals.setdefault((job, consumer, epoch, source), _Total())
        total.count += 1
        total.seconds += seconds
        total.longest = max(total.longest, seconds)

    def rows(self, job: str = "") -> list[StallRow]:
        """Of one job, or of all and of nobody, in order."""
        return [
            StallRow(
                job=name[0], consumer=name[1], epoch=name[2], source=name[3],
                count=total.count, seconds=total.seconds, longest=total.longest,
            )
            for name, total in sorted(self._totals.items())
            if not job or name[0] == job
        ]  # fmt: skip

    def of(self, job: str) -> tuple[int, float]:
        """Reads of a job that waited, and seconds they waited."""
        rows = self.rows(job)
        return sum(row.count for row in rows), sum(row.seconds for row in rows)

    def forget(self, job: str) -> None:
        for name in [name for name in self._totals if name[0] == job]:
            del self._totals[name]
