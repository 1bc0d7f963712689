"""The node's datasets as a list, a line for each."""

from collections import Counter
from dataclasses import dataclass

from cachefs.errors import public_url
from cachefs_daemon.datasets.catalog import Dataset
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.node import Node
from cachefs_daemon.web.paging import RowPage, page_of


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A dataset at its current snapshot."""

    name: str
    url: str
    # "" where it is lost.
    snapshot: str
    files: int
    bytes: int
    # Unix seconds at which the snapshot was made.
    created: float
    # Keys of the origin that are not files.
    problems: int
    # The share of each tier that it may take.
    share: float
    # Jobs that read it now.
    jobs: int


def dataset_rows(node: Node, page: int, match: str) -> RowPage[DatasetRow]:
    """Return datasets, those with jobs first, then by name. match: a part of the name."""
    readers = _readers(node)
    wanted = match.casefold()
    found = [one for one in node.catalog if wanted in one.record.name.casefold()]
    found.sort(key=lambda one: (-readers[one.record.name], one.record.name))
    shown = page_of(found, page)
    return RowPage([_row(one, readers) for one in shown.rows], shown.page, shown.pages, shown.total)


def dataset_row(node: Node, name: str) -> DatasetRow:
    """Return one dataset. Raises NotFound."""
    return _row(node.catalog.get(name), _readers(node))


def _readers(node: Node) -> Counter[str]:
    """Return the number of jobs that read each dataset, by name."""
    running = (job for job in node.jobs if job.state == JobState.RUNNING)
    return Counter(name for job in running for name in set(job.datasets.values()))


def _row(dataset: Dataset, readers: Counter[str]) -> DatasetRow:
    record, snapshot = dataset.record, dataset.current
    return DatasetRow(
        name=record.name,
        url=public_url(record.url),
        snapshot=snapshot.id if snapshot else "",
        files=snapshot.files if snapshot else 0,
        bytes=snapshot.bytes if snapshot else 0,
        created=snapshot.created_ns / 1e9 if snapshot else 0.0,
        problems=snapshot.problem_count if snapshot else 0,
        share=record.share,
        jobs=readers[record.name],
    )
