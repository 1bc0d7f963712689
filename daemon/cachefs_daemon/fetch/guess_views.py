"""What was guessed for readers who have published nothing, and how right it was."""

from collections.abc import Iterable
from dataclasses import asdict

from cachefs.job_messages import GuessView
from cachefs.messages import GuessCounts
from cachefs.planning.prefetch.guess_counts import GuessBook, Guesses
from cachefs_daemon.datasets.catalog import Dataset


def guess_views(book: GuessBook, datasets: Iterable[Dataset]) -> list[GuessView]:
    """By snapshot and rule, the snapshots of which something was guessed last first."""
    names = {known.id: dataset.record.name for dataset in datasets for known in dataset.record.snapshots}
    return [
        GuessView(dataset=names.get(snapshot, ""), snapshot=snapshot, rule=rule, counts=guess_counts(guesses))
        for snapshot, rule, guesses in book.rows()
    ]


def guess_counts(guesses: Guesses) -> GuessCounts:
    """As a message."""
    return GuessCounts(**asdict(guesses))
