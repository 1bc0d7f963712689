"""cachectl stats: what goes on at a mount, a line at a time."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Final

import click

from cachefs.errors import NotFound
from cachefs.job_messages import ConsumerView, JobView
from cachefs.messages import Empty, MountView
from cachefs.mount_spec import MountSpec
from cachefs.rpc import JOB_LIST, STATUS
from cachefs_tools.cachectl.display import name, size
from cachefs_tools.cachectl.session import Session, with_session

LINES_PER_HEADER: Final = 20
HEADER: Final = """\
requests   /1000  samples ------- reads/s ------- pushed dropped  late wasted ---- page cache ----
      /s samples       /s  memory     ssd  missed   MB/s    MB/s    /s     /s      held     budget"""


@dataclass(frozen=True, slots=True)
class Moment:
    """when: monotonic seconds; counters: of the mount, cumulative; consumers: of the jobs that read its datasets, by
    job and consumer."""

    when: float
    counters: dict[str, int]
    consumers: dict[tuple[str, str], ConsumerView]


@dataclass(frozen=True, slots=True)
class Stats:
    """A mount from one moment to the next; all but the last two per second. requests: of the kernel; samples: by which
    the jobs that have published what they read of the mount's datasets went on; late: reads that came before the push
    of what they wanted; wasted: blocks dropped unread; held_bytes: what the daemon takes to be in the page cache."""

    seconds: float
    requests: float
    requests_per_1000_samples: float | None
    samples: float
    hits_memory: float
    hits_ssd: float
    misses: float
    pushed_bytes: float
    dropped_bytes: float
    late: float
    wasted: float
    held_bytes: int
    budget_bytes: int


@click.command()
@click.argument("mount", metavar="MOUNT")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds per line.")
@click.option("--count", "lines", type=click.IntRange(min=1), help="End after so many lines.")
@with_session
def stats(session: Session, mount: str, interval: float, lines: int | None) -> None:
    """Watch MOUNT (where it is mounted, or its id), a line a second; with --json each line is an object.

    Reads are those the kernel could not answer from its page cache. Two mounts of one dataset show the samples of both.
    """
    differences = (difference(before, now) for before, now in pairwise(moments(session, mount, interval)))
    for number, line in enumerate(islice(differences, lines)):
        if session.as_json:
            click.echo(json.dumps(asdict(line)))
            continue
        if number % LINES_PER_HEADER == 0:
            click.echo(HEADER)
        click.echo(row(line))


def moments(session: Session, mount: str, interval: float) -> Iterator[Moment]:
    """Now, and every *interval* seconds from now. Raises NotFound where there is no such mount (any more)."""
    start = time.monotonic()
    for turn in count(1):
        view = find(session.call(STATUS, Empty()).mounts, mount)
        jobs = session.call(JOB_LIST, Empty()).jobs
        yield Moment(time.monotonic(), view.counters, consumers_of(view, jobs))
        time.sleep(max(0.0, start + turn * interval - time.monotonic()))


def find(mounts: list[MountView], wanted: str) -> MountView:
    # Only the parent is resolved, since looking at the mount point itself would ask the mount.
    given = Path(os.path.abspath(wanted))
    path = str(given.parent.resolve() / given.name)
    for view in mounts:
        if view.alive and (view.id == wanted or view.mountpoint in (wanted, path)):
            return view
    raise NotFound(f"{name(wanted)} is no mount of this node that lives; `cachectl mounts` shows those")


def consumers_of(mount: MountView, jobs: list[JobView]) -> dict[tuple[str, str], ConsumerView]:
    spec = MountSpec.parse(mount.spec)
    return {
        (job.job, consumer.consumer): consumer for job in jobs if spec.shows(job.dataset) for consumer in job.consumers
    }


def difference(before: Moment, now: Moment) -> Stats:
    seconds = now.when - before.when

    def per_second(*names: str) -> float:
        # What the daemon itself counts begins anew when it is restarted.
        change = sum(now.counters.get(name, 0) - before.counters.get(name, 0) for name in names)
        return max(0, change) / seconds

    requests = per_second("requests")
    samples = sum(
        advance(before.consumers[key], view) for key, view in now.consumers.items() if key in before.consumers
    )
    return Stats(
        seconds=seconds,
        requests=requests,
        requests_per_1000_samples=1000 * requests * seconds / samples if samples else None,
        samples=samples / seconds,
        hits_memory=per_second("hits_memory"),
        hits_ssd=per_second("hits_ssd"),
        misses=per_second("misses"),
        pushed_bytes=per_second("push_stored_bytes"),
        dropped_bytes=per_second("push_dropped_bytes"),
        late=per_second("push_late"),
        wasted=per_second("push_wasted"),
        held_bytes=now.counters.get("push_held_bytes", 0),
        budget_bytes=now.counters.get("push_budget", 0),
    )


def advance(before: ConsumerView, now: ConsumerView) -> int:
    """Samples between two places of a consumer; 0 where it went back."""
    epochs = now.epoch - before.epoch
    return max(0, epochs * before.epoch_length + now.position - before.position)


def row(line: Stats) -> str:
    per_1000 = "-" if line.requests_per_1000_samples is None else f"{line.requests_per_1000_samples:.0f}"
    reads = "".join(f"{rate:8.0f}" for rate in (line.hits_memory, line.hits_ssd, line.misses))
    moved = f"{line.pushed_bytes / 1e6:7.0f}{line.dropped_bytes / 1e6:8.0f}{line.late:6.0f}{line.wasted:7.0f}"
    held, budget = (size(amount) if line.budget_bytes else "-" for amount in (line.held_bytes, line.budget_bytes))
    return f"{line.requests:8.0f}{per_1000:>8}{line.samples:9.0f}{reads}{moved}{held:>10}{budget:>11}"
