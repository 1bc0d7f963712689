"""cachectl stats: what goes on at a mount, one line per second."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice, pairwise
from typing import Final

import click

from cachefs.errors import NotFound
from cachefs.job_messages import ConsumerView, JobView
from cachefs.messages import Empty, MountView
from cachefs.mount_spec import MountSpec
from cachefs.rpc import JOB_LIST, STATUS
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import name, size
from cachefs_tools.cachectl.mount_points import resolved_mount_point

LINES_PER_HEADER: Final = 20
HEADER: Final = """\
  reqs  reqs samples ----- reads/s ----- -- MB/s --- late waste - page cache --
    /s /1000      /s memory   ssd missed  push  drop   /s    /s    held  budget"""


@dataclass(frozen=True, slots=True)
class Moment:
    """A mount at one moment."""

    when: float  # monotonic seconds
    counters: dict[str, int]  # of the mount, counted since it started
    consumers: dict[tuple[str, str], ConsumerView]  # (job, consumer) -> a consumer that reads the mount's datasets


@dataclass(frozen=True, slots=True)
class Stats:
    """What a mount did from one moment to the next. The fields are the keys of the JSON objects."""

    seconds: float  # between the two moments
    requests: float  # requests of the kernel, per second
    ioctls: float  # those of them that ask whether a file is a terminal, and the like, per second
    requests_per_1000_samples: float | None  # None: no job went on
    samples: float  # samples that jobs which have published a sequence went on by, per second
    hits_memory: float  # reads that the memory tier answered, per second
    hits_ssd: float  # reads that the SSD tier answered, per second
    misses: float  # reads that waited for a fetch, per second
    pushed_bytes: float  # per second
    dropped_bytes: float  # per second
    late: float  # reads that came before their block was pushed, per second
    wasted: float  # blocks that were dropped before they were read, per second
    held_bytes: int  # what the daemon believes to be in the page cache, at the second moment
    budget_bytes: int  # how much may be in the page cache, at the second moment


@click.command()
@click.argument("mount", metavar="MOUNT")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds from line to line."
)
@click.option("--count", "lines", type=click.IntRange(min=1), help="End after so many lines.  [default: never]")
@with_session
def stats(session: CommandSession, mount: str, interval: float, lines: int | None) -> None:
    """Watch MOUNT, which is a mount point or the id of a mount. With --json each line is an object.

    Reads are only those that the kernel could not answer from its page cache. Where a dataset is mounted twice, both
    mounts show the samples of both.
    """
    differences = (difference(before, now) for before, now in pairwise(moments(session, mount, interval)))
    for number, line in enumerate(islice(differences, lines)):
        if session.as_json:
            click.echo(json.dumps(asdict(line)))
            continue
        if number % LINES_PER_HEADER == 0:
            click.echo(HEADER)
        click.echo(row(line))


def moments(session: CommandSession, mount: str, interval: float) -> Iterator[Moment]:
    """The mount now, and then every *interval* seconds. Raises NotFound where the mount does not live (any more)."""
    start = time.monotonic()
    for turn in count(1):
        view = find(session.call(STATUS, Empty()).mounts, mount)
        jobs = session.call(JOB_LIST, Empty()).jobs
        yield Moment(time.monotonic(), view.counters, consumers_of(view, jobs))
        time.sleep(max(0.0, start + turn * interval - time.monotonic()))


def find(mounts: list[MountView], wanted: str) -> MountView:
    """The mount with this id, or at this path. Raises NotFound where none lives."""
    path = str(resolved_mount_point(wanted))
    for view in mounts:
        if view.alive and (view.id == wanted or view.mountpoint in (wanted, path)):
            return view
    raise NotFound(f"{name(wanted)} is no mount of this node that lives; `cachectl mounts` shows those")


def consumers_of(mount: MountView, jobs: list[JobView]) -> dict[tuple[str, str], ConsumerView]:
    """(job, consumer) -> the consumers of all jobs that read a dataset of the mount."""
    spec = MountSpec.parse(mount.spec)
    return {
        (job.job, consumer.consumer): consumer for job in jobs if spec.shows(job.dataset) for consumer in job.consumers
    }


def difference(before: Moment, now: Moment) -> Stats:
    """What the mount did between two moments."""
    seconds = now.when - before.when

    def per_second(*names: str) -> float:
        # Counters of the daemon itself begin at 0 again when it is restarted.
        change = sum(now.counters.get(name, 0) - before.counters.get(name, 0) for name in names)
        return max(0, change) / seconds

    requests = per_second("requests")
    samples = sum(
        advance(before.consumers[key], view) for key, view in now.consumers.items() if key in before.consumers
    )
    return Stats(
        seconds=seconds,
        requests=requests,
        ioctls=per_second("ioctl"),
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
    """How many samples a consumer went on by; 0 where it went back."""
    epochs = now.epoch - before.epoch
    return max(0, epochs * before.epoch_length + now.position - before.position)


def row(line: Stats) -> str:
    """A line below HEADER."""
    per_1000 = "-" if line.requests_per_1000_samples is None else f"{line.requests_per_1000_samples:.0f}"
    reads = f"{line.hits_memory:7.0f}{line.hits_ssd:6.0f}{line.misses:7.0f}"
    moved = f"{line.pushed_bytes / 1e6:6.0f}{line.dropped_bytes / 1e6:6.0f}{line.late:5.0f}{line.wasted:6.0f}"
    held, budget = (_short(amount) if line.budget_bytes else "-" for amount in (line.held_bytes, line.budget_bytes))
    return f"{line.requests:6.0f}{per_1000:>6}{line.samples:8.0f}{reads}{moved}{held:>8}{budget:>8}"


def _short(amount: int) -> str:
    return size(amount).replace(" ", "")
