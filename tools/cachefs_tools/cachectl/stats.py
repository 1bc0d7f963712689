"""cachectl stats: shows the activity of a mount, one line per second."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice, pairwise
from typing import Final

import click

from cachefs.errors import NotFound
from cachefs.job_messages import ConsumerView, JobView
from cachefs.messages import Empty, MountView
from cachefs.mount_spec import MountSpec
from cachefs.rpc import JOB_LIST, STATUS
from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, output_width, with_session
from cachefs_tools.cachectl.display import ColumnKind, TableColumn, compact, fit_columns, size
from cachefs_tools.cachectl.mount_points import resolved_mount_point
from cachefs_tools.escaped_names import escape_name

# Rows between two headers.
LINES_PER_HEADER: Final = 20


@dataclass(frozen=True, slots=True)
class MountSample:
    """A mount at one moment."""

    when: float  # monotonic seconds
    counters: dict[str, int]  # of the mount, counted since it started
    consumers: dict[tuple[str, str], ConsumerView]  # (job, consumer) -> a consumer that reads the mount's datasets


@dataclass(frozen=True, slots=True)
class MountActivity:
    """Activity of a mount between two moments. The fields are the keys of the JSON objects."""

    seconds: float  # between the two moments
    requests: float  # requests of the kernel, per second
    ioctls: float  # isatty() and similar requests among them, per second
    requests_per_1000_samples: float | None  # None: no job made progress
    samples: float  # progress of jobs with a published sequence, in samples per second
    hits_memory: float  # reads from the memory tier, per second
    hits_ssd: float  # reads from the SSD tier, per second
    misses: float  # reads that waited for a fetch, per second
    pushed_bytes: float  # per second
    dropped_bytes: float  # per second
    late: float  # reads that came before their block was pushed, per second
    wasted: float  # blocks that were dropped before they were read, per second
    held_bytes: int  # bytes in the page cache according to the daemon, at the second moment
    budget_bytes: int  # limit of these bytes, at the second moment


@click.command()
@click.argument("mount", metavar="MOUNT", shell_complete=completion.mount_points)
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds from line to line."
)
@click.option("--count", "lines", type=click.IntRange(min=1), help="Exit after this number of lines.  [default: never]")
@with_session
def stats(session: CommandSession, mount: str, interval: float, lines: int | None) -> None:
    """Watch MOUNT, which is a mount point or the id of a mount. With --json each line is an object.

    Reads are only those that the kernel could not answer from its page cache. Where a dataset is mounted twice, both
    mounts show the samples of both.
    """
    differences = (activity_between(before, now) for before, now in pairwise(sample_mount(session, mount, interval)))
    width, lines_below = 0, 0
    for line in islice(differences, lines):
        if session.as_json:
            click.echo(json.dumps(asdict(line)))
            continue
        room = output_width()
        if room != width or lines_below == LINES_PER_HEADER:
            width, lines_below = room, 0
            click.echo("\n".join(header(width)))
        click.echo(row(line, width))
        lines_below += 1


def sample_mount(session: CommandSession, mount: str, interval: float) -> Iterator[MountSample]:
    """Yield the mount now, and then every *interval* seconds. Raises NotFound if the mount is not alive."""
    start = time.monotonic()
    for turn in count(1):
        view = find_mount_view(session.call(STATUS, Empty()).mounts, mount)
        jobs = session.call(JOB_LIST, Empty()).jobs
        yield MountSample(time.monotonic(), view.counters, consumers_of(view, jobs))
        time.sleep(max(0.0, start + turn * interval - time.monotonic()))


def find_mount_view(mounts: list[MountView], wanted: str) -> MountView:
    """Return the mount with this id or path. Raises NotFound if none is alive."""
    path = str(resolved_mount_point(wanted))
    for view in mounts:
        if view.alive and (view.id == wanted or view.mountpoint in (wanted, path)):
            return view
    raise NotFound(f"{escape_name(wanted)} is not a live mount of this node; `cachectl mounts` lists them")


def consumers_of(mount: MountView, jobs: list[JobView]) -> dict[tuple[str, str], ConsumerView]:
    """Return by (job, consumer) the consumers of all jobs that read a dataset of the mount."""
    spec = MountSpec.parse(mount.spec)
    return {
        (job.job, consumer.consumer): consumer
        for job in jobs
        if spec.is_showing(job.dataset)
        for consumer in job.consumers
    }


def activity_between(before: MountSample, now: MountSample) -> MountActivity:
    """Return the activity between two moments."""
    seconds = now.when - before.when

    def per_second(*names: str) -> float:
        # The daemon's own counters restart at 0 with the daemon.
        change = sum(now.counters.get(name, 0) - before.counters.get(name, 0) for name in names)
        return max(0, change) / seconds

    requests = per_second("requests")
    samples = sum(
        sample_progress(before.consumers[key], view) for key, view in now.consumers.items() if key in before.consumers
    )
    return MountActivity(
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


def sample_progress(before: ConsumerView, now: ConsumerView) -> int:
    """Return a consumer's progress in samples; 0 if it went back."""
    epochs = now.epoch - before.epoch
    return max(0, epochs * before.epoch_length + now.position - before.position)


@dataclass(frozen=True, slots=True)
class _StatsColumn:
    heading: str
    unit: str  # below the heading
    width: int
    value: Callable[[MountActivity, int], str]  # cell of a line, given the column's width
    spare: int = 0  # see `tables.TableColumn`


def _number(get: Callable[[MountActivity], float]) -> Callable[[MountActivity, int], str]:
    return lambda line, width: compact(get(line), width)


def _pages(amount: int, line: MountActivity) -> str:
    return size(amount).replace(" ", "") if line.budget_bytes else "-"


_COLUMNS: Final = (
    _StatsColumn("reqs", "/s", 5, _number(lambda line: line.requests), 1),
    _StatsColumn("reqs", "/1000", 5, lambda line, width: _per_1000(line.requests_per_1000_samples, width)),
    _StatsColumn("samples", "/s", 7, _number(lambda line: line.samples)),
    _StatsColumn("memory", "/s", 6, _number(lambda line: line.hits_memory)),
    _StatsColumn("ssd", "/s", 5, _number(lambda line: line.hits_ssd)),
    _StatsColumn("missed", "/s", 6, _number(lambda line: line.misses)),
    _StatsColumn("push", "MB/s", 5, _number(lambda line: line.pushed_bytes / 1e6), 2),
    _StatsColumn("drop", "MB/s", 5, _number(lambda line: line.dropped_bytes / 1e6), 3),
    _StatsColumn("late", "/s", 4, _number(lambda line: line.late), 2),
    _StatsColumn("waste", "/s", 5, _number(lambda line: line.wasted), 3),
    _StatsColumn("held", "pages", 7, lambda line, _: _pages(line.held_bytes, line), 2),
    _StatsColumn("budget", "pages", 7, lambda line, _: _pages(line.budget_bytes, line), 3),
)


def _per_1000(requests: float | None, width: int) -> str:
    return "-" if requests is None else compact(requests, width)


def _fitting_columns(width: int) -> list[_StatsColumn]:
    columns = [TableColumn(field.heading, ColumnKind.NUMBER, field.spare) for field in _COLUMNS]
    return [_COLUMNS[index] for index in fit_columns(columns, [field.width for field in _COLUMNS], width)]


def header(width: int) -> tuple[str, str]:
    """Return the two header lines for a terminal of *width* columns."""
    fields = _fitting_columns(width)
    return " ".join(f"{field.heading:>{field.width}}" for field in fields), " ".join(
        f"{field.unit:>{field.width}}" for field in fields
    )


def row(line: MountActivity, width: int) -> str:
    """Return a line below the header."""
    return " ".join(f"{field.value(line, field.width):>{field.width}}" for field in _fitting_columns(width))
