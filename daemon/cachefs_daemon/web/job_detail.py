"""The details of one job: its history, and the waiting times of its ranks."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cachefs.job_messages import ConsumerView, StallRow
from cachefs_daemon.node import Node
from cachefs_daemon.web.job_history import JobHistory
from cachefs_daemon.web.job_rows import JobRow, job_row

# Ranks that are shown: those that have waited longest.
MAX_RANKS: Final = 32


@dataclass(slots=True)
class RankRow:
    """A consumer of the job, with the waiting times of its reads."""

    rank: str
    # The line of the program that created its loader, if known.
    loader: str = ""
    state: str = ""
    problem: str = ""
    epoch: int | None = None
    # Samples of the epoch that are read, and samples in the epoch (0: unknown).
    read: int = 0
    length: int = 0
    # Samples per second.
    rate: float = 0.0
    # Reads that have waited; seconds of all of them, and of the longest one.
    waits: int = 0
    waited: float = 0.0
    longest: float = 0.0
    # Seconds by source: `origin`, `ssd`, `daemon`, `peer`.
    sources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job's row, its history and its ranks."""

    job: JobRow
    # Seconds between two rows of the history, and its columns (see job_history.JobHistoryRow); empty without a history.
    period: float
    history: dict[str, list[float]]
    # The ranks that have waited longest, and the number of all ranks.
    ranks: list[RankRow]
    all_ranks: int


def job_detail(node: Node, name: str, history: JobHistory | None) -> JobDetail:
    """Return the details. Raises NotFound."""
    job = node.jobs.get(name)
    last = {view.consumer: view for view in job.ended_views}
    ranks = rank_rows([*last, *job.consumers], node.jobs.stall_rows(name))
    shown = ranks[:MAX_RANKS]
    for rank in shown:
        consumer = job.consumers.get(rank.rank)
        view = consumer.make_view(0, time.monotonic()) if consumer is not None else last.get(rank.rank)
        if view is not None:
            _fill_from_view(rank, view)
    return JobDetail(
        job=job_row(node, job),
        period=history.period if history is not None else 0.0,
        history=history.columns() if history is not None else {},
        ranks=shown,
        all_ranks=len(ranks),
    )


def rank_rows(names: Iterable[str], stalls: Iterable[StallRow]) -> list[RankRow]:
    """Return the ranks, those that have waited longest first."""
    ranks = {name: RankRow(name) for name in names}
    for stall in stalls:
        rank = ranks.setdefault(stall.consumer, RankRow(stall.consumer))
        rank.waits += stall.count
        rank.waited += stall.seconds
        rank.longest = max(rank.longest, stall.longest)
        source = stall.source.partition(" ")[0]
        rank.sources[source] = rank.sources.get(source, 0.0) + stall.seconds
    return sorted(ranks.values(), key=lambda one: (-one.waited, _number(one.rank), one.rank))


def _fill_from_view(rank: RankRow, view: ConsumerView) -> None:
    rank.loader = view.loader.name if view.loader is not None else ""
    rank.state, rank.problem = view.state, view.problem
    rank.epoch, rank.read, rank.length, rank.rate = view.epoch, view.position, view.epoch_length, view.rate


def _number(rank: str) -> int:
    """Return a sort key, by which rank 10 comes after rank 9."""
    return int(rank) if rank.isdecimal() and len(rank) < 10 else 1 << 40
