"""Views of readahead guesses, for readers without a published sequence, and how right they were."""

from collections.abc import Iterable
from dataclasses import asdict

from cachefs.job_messages import GuessView
from cachefs.messages import GuessCounts
from cachefs.planning.prefetch.guess_counts import GuessBook, Guesses
from cachefs_daemon.datasets.catalog import Dataset


def guess_views(book: GuessBook, datasets: Iterable[Dataset]) -> list[GuessView]:
    """Return the counts by snapshot and rule, most recent snapshots first."""
    names = {known.id: dataset.record.name for dataset in datasets for known in dataset.record.snapshots}
    return [
        GuessView(dataset=names.get(snapshot, ""), snapshot=snapshot, rule=rule, counts=guess_counts(guesses))
        for snapshot, rule, guesses in book.rows()
    ]


def guess_counts(guesses: Guesses) -> GuessCounts:
    """Convert to a message."""
    return GuessCounts(**asdict(guesses))
