"""The lists of the picture (jobs, datasets and mounts): rows, sorting and filtering."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cachefs.counts import duration
from cachefs.job_messages import ConsumerView, JobView
from cachefs.messages import DatasetView, MountView
from cachefs.troubles import short
from cachefs_tools.cachectl.display import size
from cachefs_tools.cachectl.status import mount_state
from cachefs_tools.cachectl.tables import Column, Kind
from cachefs_tools.cachectl.top.history import History
from cachefs_tools.cachectl.top.pen import Pen
from cachefs_tools.cachectl.top.picture import Picture
from cachefs_tools.names import escape

RUNNING: Final = "running"
# A job that waits for more than this share of the time is highlighted.
ALARMING: Final = 0.1
# Width of a bar in a row.
BAR: Final = 12


class Part(StrEnum):
    """The lists of the screen."""

    JOBS = "JOBS"
    DATASETS = "DATASETS"
    MOUNTS = "MOUNTS"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a list."""

    key: str  # unique within its list
    cells: tuple[str, ...]
    # Sort keys, one for each of the list's orders.
    sort: tuple[float | str, ...]
    # Highlighted for a problem; dimmed if over or not in use.
    alarm: bool = False
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """A list as shown."""

    part: Part
    columns: Sequence[Column]
    # The headings by which it can be sorted. The first one is that of names, in ascending order; numbers descend.
    orders: Sequence[str]
    rows: list[Row]


def arranged(listing: Listing, order: int, needle: str, *, turned: bool) -> list[Row]:
    """Return the rows with *needle* in a name, in the given order. turned: reversed."""
    wanted = needle.casefold()
    texts = [at for at, column in enumerate(listing.columns) if column.kind in (Kind.NAME, Kind.WORD)]
    rows = [row for row in listing.rows if not wanted or any(wanted in row.cells[at].casefold() for at in texts)]
    at = order % len(listing.orders)
    rows.sort(key=lambda row: (row.faint, row.key))  # finished items come last
    if at:
        rows.sort(key=lambda row: row.sort[at], reverse=True)
    return rows[::-1] if turned else rows


def _columns(text: str) -> list[Column]:
    return [Column.parse(part) for part in text.split()]


_JOBS: Final = _columns("JOB DATASET? =STATE?? >EPOCH? =DONE >RATE >WAITED =WHY? >LEFT??")
_DATASETS: Final = _columns("DATASET >SIZE =CACHED >MEMORY? >SSD? >FILES?? URL???")
_MOUNTS: Final = _columns("MOUNTPOINT SPEC? =STATE >READS/S >REQS/S? >ERRORS? >PID??")


def jobs(picture: Picture, history: History, pen: Pen) -> Listing:
    """Return a row for each job. Epoch (from 1) and progress are those of its slowest consumer."""
    return Listing(
        Part.JOBS, _JOBS, ("JOB", "DONE", "RATE", "WAITED"),
        [_job_row(view, history, pen) for view in picture.jobs.jobs],
    )  # fmt: skip


def _job_row(view: JobView, history: History, pen: Pen) -> Row:
    slowest = min(view.consumers, key=lambda one: (one.epoch, one.position), default=None)
    is_over = view.state != RUNNING
    part = done(slowest) if slowest is not None and not is_over else None
    rate = None if is_over else history.samples.get(view.job)
    waited = None if is_over else history.waited.get(view.job)
    left = "-" if slowest is None else _left(slowest, (rate or 0.0) / len(view.consumers))
    cells = (
        escape(view.job), escape(view.dataset), view.state, "-" if slowest is None else str(slowest.epoch + 1),
        progress(part, pen), "-" if rate is None else f"{rate:,.0f}/s",
        "-" if waited is None else f"{100 * waited:.0f} %", short(view.troubles), left,
    )  # fmt: skip
    numbers = [-1.0 if value is None else value for value in (part, rate, waited)]
    problem = bool(view.troubles) or any(one.problem for one in view.consumers)
    alarm = (waited or 0.0) > ALARMING or (not is_over and problem)
    return Row(view.job, cells, (view.job, *numbers), alarm=alarm, faint=is_over)


def done(view: ConsumerView) -> float | None:
    """Return the share of its epoch that a consumer has read, 0 to 1; None if its length is unknown."""
    return min(1.0, view.position / view.epoch_length) if view.epoch_length else None


def _left(view: ConsumerView, rate: float) -> str:
    """Return the remaining time of its epoch at this number of samples per second."""
    left = view.epoch_length - view.position
    return duration(left / rate) if left > 0 and rate > 0 else "-"


def progress(part: float | None, pen: Pen) -> str:
    """Return a bar followed by the percentage."""
    return "-" if part is None else f"{pen.bar(part, BAR)} {100 * part:3.0f} %"


def datasets(picture: Picture, _: History, pen: Pen) -> Listing:
    """Return a row for each dataset."""
    return Listing(
        Part.DATASETS, _DATASETS, ("DATASET", "SIZE", "CACHED"),
        [_dataset_row(view, picture, pen) for view in picture.datasets],
    )  # fmt: skip


def _dataset_row(view: DatasetView, picture: Picture, pen: Pen) -> Row:
    known = picture.cached.get(view.name)
    here = None if known is None else known.memory + known.ssd
    part = here / known.bytes if known is not None and here is not None and known.bytes else None
    tiers = ("-", "-") if known is None else (size(known.memory), size(known.ssd))
    cells = (view.name, size(view.bytes), progress(part, pen), *tiers, f"{view.files:,}", escape(view.url))
    sort = (view.name, float(view.bytes), -1.0 if here is None else float(here))
    return Row(view.name, cells, sort, alarm=not view.snapshot)


def mounts(picture: Picture, history: History, _: Pen) -> Listing:
    """Return a row for each mount."""
    return Listing(
        Part.MOUNTS, _MOUNTS, ("MOUNTPOINT", "READS/S", "REQS/S", "ERRORS"),
        [_mount_row(view, history) for view in picture.status.mounts],
    )  # fmt: skip


def _mount_row(view: MountView, history: History) -> Row:
    reads, requests = (history.mounts.get((view.id, counter), 0.0) for counter in ("read", "requests"))
    errors = view.counters.get("errors", 0)
    cells = (
        escape(view.mountpoint), escape(view.spec), mount_state(view), f"{reads:,.0f}", f"{requests:,.0f}",
        f"{errors:,}", str(view.pid),
    )  # fmt: skip
    return Row(view.id, cells, (view.mountpoint, reads, requests, float(errors)), alarm=not view.alive)


# In order of display.
LISTINGS: Final[Mapping[Part, Callable[[Picture, History, Pen], Listing]]] = {
    Part.JOBS: jobs, Part.DATASETS: datasets, Part.MOUNTS: mounts,
}  # fmt: skip
