"""Views of readahead guesses, for readers without a published sequence, and how right they were."""

from collections.abc import Iterable
from dataclasses import asdict

from cachefs.job_messages import ReadaheadView
from cachefs.messages import ReadaheadCounts
from cachefs.planning.prefetch.readahead_budget import ReadaheadCounters, RuleCounts
from cachefs_daemon.datasets.catalog import Dataset


def readahead_views(book: ReadaheadCounters, datasets: Iterable[Dataset]) -> list[ReadaheadView]:
    """Return the counts by snapshot and rule, most recent snapshots first."""
    names = {known.id: dataset.record.name for dataset in datasets for known in dataset.record.snapshots}
    return [
        ReadaheadView(dataset=names.get(snapshot, ""), snapshot=snapshot, rule=rule, counts=readahead_counts(guesses))
        for snapshot, rule, guesses in book.rows()
    ]


def readahead_counts(guesses: RuleCounts) -> ReadaheadCounts:
    """Convert to a message."""
    return ReadaheadCounts(**asdict(guesses))
