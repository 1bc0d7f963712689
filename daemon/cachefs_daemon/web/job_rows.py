"""The node's jobs as a list, a line for each."""

import os
import time
from dataclasses import dataclass
from typing import Final

from cachefs.job_progress import group_by_loader, share_text, wait_explanation, waited_share
from cachefs.trouble_texts import describe_trouble
from cachefs_daemon.jobs.owners import name_without_owner, owner_of
from cachefs_daemon.jobs.registry import Job
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.node import Node
from cachefs_daemon.web.paging import RowPage, page_of

# Consumers of a job that are examined, 5 us each. Of more, every n-th stands for the others.
MAX_CONSUMERS: Final = 32


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job."""

    # The full name, the one that its user gave it, and its owner: a user id, or "" for the daemon's own user.
    id: str
    name: str
    owner: str
    dataset: str
    state: str
    # The reason for its end, where it did not end itself.
    reason: str
    # Unix seconds.
    started: float
    # Its ranks with consumers here.
    ranks: int
    # Of the rank that is furthest behind: its epoch, and the part of it that is read; None: unknown.
    epoch: int | None
    part: float | None
    # Seconds until that rank has read the epoch; None: unknown.
    left: float | None
    # Samples per second of all ranks.
    rate: float
    # Seconds that its reads have waited.
    waited: float
    # Bytes that came for it: from origins, and from other nodes.
    fetched: int
    from_peers: int
    # What it wants of origins and gets, as text.
    shares: list[str]
    # Troubles of its reads, as text, the worst first.
    troubles: list[str]
    # The share of its time in which its loop has waited; None: no DataLoader has reported. And the cause, with advice.
    loop_waited: float | None
    advice: str


def job_rows(node: Node, page: int) -> RowPage[JobRow]:
    """Return the jobs, running ones first, then those that began last."""
    jobs = sorted(node.jobs, key=lambda job: (job.state != JobState.RUNNING, -job.started))
    found = page_of(jobs, page)
    return RowPage([job_row(node, job) for job in found.rows], found.page, found.pages, found.total)


def job_row(node: Node, job: Job) -> JobRow:
    consumers = list(job.consumers.values())
    every = max(1, -(-len(consumers) // MAX_CONSUMERS))
    looked_at = consumers[::every]
    positions = [(*one.progress, one.rate) for one in looked_at]
    epoch, read, length, rate = min(
        positions, key=lambda one: (one[0], one[1] / max(1, one[2])), default=(None, 0, 0, 0)
    )
    views = [*job.ended_views, *(one.make_view(0, time.monotonic()) for one in looked_at)]
    loaders = group_by_loader(views[-MAX_CONSUMERS:])
    return JobRow(
        id=job.name,
        name=name_without_owner(job.name),
        owner=owner_of(job.name),
        dataset=", ".join(dict.fromkeys(job.datasets.values())),
        state=job.state,
        reason=job.reason,
        started=job.started,
        ranks=len({consumer.request.rank for consumer in consumers}),
        epoch=epoch,
        part=read / length if length else None,
        left=(length - read) / rate if length and rate > 0 else None,
        rate=every * sum(position[3] for position in positions),
        waited=node.jobs.waited_reads(job.name)[1],
        fetched=job.fetched_bytes,
        from_peers=job.peer_bytes,
        shares=[share_text(one) for one in node.lookahead.shares.shares_of(job.name)],
        troubles=[describe_trouble(one, time.time()) for one in node.jobs.troubles_of(job)],
        loop_waited=waited_share(loaders),
        advice=wait_explanation(loaders, os.cpu_count() or 0),
    )
