"""The lists of the picture (jobs, datasets and mounts): rows, sorting and filtering, and their parts of the terminal.

`TopState` holds the user's choices: list, row, order, and opened item.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.formatting import format_duration
from cachefs.job_messages import ConsumerView, JobView
from cachefs.messages import DatasetView, MountView
from cachefs.trouble_texts import short_text
from cachefs_tools.cachectl.display import ColumnKind, TableColumn, size
from cachefs_tools.cachectl.status import mount_state
from cachefs_tools.cachectl.top.glyphs import Glyphs
from cachefs_tools.cachectl.top.history import RateHistory
from cachefs_tools.cachectl.top.picture import Picture
from cachefs_tools.escaped_names import escape_name

RUNNING: Final = "running"
# A job that waits for more than this share of the time is highlighted.
ALARM_SHARE: Final = 0.1
# Width of a bar in a row.
BAR_WIDTH: Final = 12


def divide_lines(room: int, wanted: Sequence[int], first: int) -> list[int]:
    """Return the lines of *room* for each list: equal parts up to what each wants, but up to half for list *first*,
    which has the cursor."""
    room, lines = max(0, room), [0] * len(wanted)
    lines[first] = min(wanted[first], (room + 1) // 2)
    while sum(lines) < room:
        hungry = [at for at, most in enumerate(wanted) if lines[at] < most]
        if not hungry:
            break
        poorest = min(hungry, key=lambda at: (lines[at], at))
        lines[poorest] += 1
    return lines


def first_visible(cursor: int, count: int, room: int, top: int) -> int:
    """Return the number of the first visible item of *count*, so that the cursor is among *room* visible ones. top: the
    previous first item."""
    top = min(top, max(0, count - room))
    return max(0, min(max(top, cursor - room + 1), cursor))


class ListKind(StrEnum):
    """The lists of the screen."""

    JOBS = "JOBS"
    DATASETS = "DATASETS"
    MOUNTS = "MOUNTS"


@dataclass(frozen=True, slots=True)
class ListRow:
    """A row of a list."""

    key: str  # unique within its list
    cells: tuple[str, ...]
    # Sort keys, one for each of the list's orders.
    sort_keys: tuple[float | str, ...]
    # Highlighted for a problem; dimmed if over or not in use.
    alarm: bool = False
    faint: bool = False


@dataclass(frozen=True, slots=True)
class ShownList:
    """A list as shown."""

    kind: ListKind
    columns: Sequence[TableColumn]
    # The headings by which it can be sorted. The first one is that of names, in ascending order; numbers descend.
    orders: Sequence[str]
    rows: list[ListRow]


def arrange_rows(listing: ShownList, order: int, filter_text: str, *, is_reversed: bool) -> list[ListRow]:
    """Return the rows with *filter_text* in a name, in the given order. is_reversed: reversed."""
    wanted = filter_text.casefold()
    texts = [at for at, column in enumerate(listing.columns) if column.kind in (ColumnKind.NAME, ColumnKind.WORD)]
    rows = [row for row in listing.rows if not wanted or any(wanted in row.cells[at].casefold() for at in texts)]
    at = order % len(listing.orders)
    rows.sort(key=lambda row: (row.faint, row.key))  # finished items come last
    if at:
        rows.sort(key=lambda row: row.sort_keys[at], reverse=True)
    return rows[::-1] if is_reversed else rows


def _columns(text: str) -> list[TableColumn]:
    return [TableColumn.parse_heading(part) for part in text.split()]


_JOBS: Final = _columns("JOB DATASET? =STATE?? >EPOCH? =DONE >RATE >WAITED =WHY? >LEFT??")
_DATASETS: Final = _columns("DATASET >SIZE =CACHED >MEMORY? >SSD? >FILES?? URL???")
_MOUNTS: Final = _columns("MOUNTPOINT SPEC? =STATE >READS/S >REQS/S? >ERRORS? >PID??")


def job_list(picture: Picture, history: RateHistory, pen: Glyphs) -> ShownList:
    """Return a row for each job. Epoch (from 1) and progress are those of its slowest consumer."""
    return ShownList(
        ListKind.JOBS, _JOBS, ("JOB", "DONE", "RATE", "WAITED"),
        [_job_row(view, history, pen) for view in picture.jobs.jobs],
    )  # fmt: skip


def _job_row(view: JobView, history: RateHistory, pen: Glyphs) -> ListRow:
    slowest = min(view.consumers, key=lambda one: (one.epoch, one.position), default=None)
    is_over = view.state != RUNNING
    part = epoch_share(slowest) if slowest is not None and not is_over else None
    rate = None if is_over else history.samples.get(view.job)
    waited = None if is_over else history.waited.get(view.job)
    left = "-" if slowest is None else _left(slowest, (rate or 0.0) / len(view.consumers))
    cells = (
        escape_name(view.job), escape_name(view.dataset), view.state,
        "-" if slowest is None else str(slowest.epoch + 1),
        progress_bar(part, pen), "-" if rate is None else f"{rate:,.0f}/s",
        "-" if waited is None else f"{100 * waited:.0f} %", short_text(view.troubles), left,
    )  # fmt: skip
    numbers = [-1.0 if value is None else value for value in (part, rate, waited)]
    problem = bool(view.troubles) or any(consumer.problem for consumer in view.consumers)
    alarm = (waited or 0.0) > ALARM_SHARE or (not is_over and problem)
    return ListRow(view.job, cells, (view.job, *numbers), alarm=alarm, faint=is_over)


def epoch_share(view: ConsumerView) -> float | None:
    """Return the share of its epoch that a consumer has read, 0 to 1; None if its length is unknown."""
    return min(1.0, view.position / view.epoch_length) if view.epoch_length else None


def _left(view: ConsumerView, rate: float) -> str:
    """Return the remaining time of its epoch at this number of samples per second."""
    left = view.epoch_length - view.position
    return format_duration(left / rate) if left > 0 and rate > 0 else "-"


def progress_bar(part: float | None, pen: Glyphs) -> str:
    """Return a bar followed by the percentage."""
    return "-" if part is None else f"{pen.draw_bar(part, BAR_WIDTH)} {100 * part:3.0f} %"


def dataset_list(picture: Picture, _: RateHistory, pen: Glyphs) -> ShownList:
    """Return a row for each dataset."""
    return ShownList(
        ListKind.DATASETS, _DATASETS, ("DATASET", "SIZE", "CACHED"),
        [_dataset_row(view, picture, pen) for view in picture.datasets],
    )  # fmt: skip


def _dataset_row(view: DatasetView, picture: Picture, pen: Glyphs) -> ListRow:
    known = picture.cached.get(view.name)
    here = None if known is None else known.memory + known.ssd
    part = here / known.bytes if known is not None and here is not None and known.bytes else None
    tiers = ("-", "-") if known is None else (size(known.memory), size(known.ssd))
    cells = (view.name, size(view.bytes), progress_bar(part, pen), *tiers, f"{view.files:,}", escape_name(view.url))
    sort = (view.name, float(view.bytes), -1.0 if here is None else float(here))
    return ListRow(view.name, cells, sort, alarm=not view.snapshot)


def mount_list(picture: Picture, history: RateHistory, _: Glyphs) -> ShownList:
    """Return a row for each mount."""
    return ShownList(
        ListKind.MOUNTS, _MOUNTS, ("MOUNTPOINT", "READS/S", "REQS/S", "ERRORS"),
        [_mount_row(view, history) for view in picture.status.mounts],
    )  # fmt: skip


def _mount_row(view: MountView, history: RateHistory) -> ListRow:
    reads, requests = (history.mounts.get((view.id, counter), 0.0) for counter in ("read", "requests"))
    errors = view.counters.get("errors", 0)
    cells = (
        escape_name(view.mountpoint), escape_name(view.spec), mount_state(view), f"{reads:,.0f}", f"{requests:,.0f}",
        f"{errors:,}", str(view.pid),
    )  # fmt: skip
    return ListRow(view.id, cells, (view.mountpoint, reads, requests, float(errors)), alarm=not view.alive)


# In order of display.
LIST_MAKERS: Final[Mapping[ListKind, Callable[[Picture, RateHistory, Glyphs], ShownList]]] = {
    ListKind.JOBS: job_list, ListKind.DATASETS: dataset_list, ListKind.MOUNTS: mount_list,
}  # fmt: skip


# More rows than any list has: moves to its end.
END: Final = 1 << 30
_PARTS: Final = list(ListKind)

Rows = Mapping[ListKind, Sequence[ListRow]]


@dataclass(slots=True)
class TopState:
    """State changed by keys only."""

    list_kind: ListKind = ListKind.JOBS  # the list with the cursor
    orders: dict[ListKind, int] = field(default_factory=lambda: dict.fromkeys(ListKind, 0))  # see `lists.arrange_rows`
    reversed_lists: set[ListKind] = field(default_factory=set)
    filter_text: str = ""  # rows without this text are left out
    opened_job: str = ""  # the job shown alone; empty: none
    scroll_offset: int = 0  # hidden lines above the opened job or the help
    is_help_open: bool = False
    # By list: key of the row with the cursor, and number of the first visible row.
    _cursors: dict[ListKind, str] = field(default_factory=dict)
    _tops: dict[ListKind, int] = field(default_factory=lambda: dict.fromkeys(ListKind, 0))

    def cursor_row(self, part: ListKind, rows: Sequence[ListRow]) -> int:
        """Return the number of the row with the cursor, which follows its item as others come and go."""
        key = self._cursors.get(part)
        return next((number for number, row in enumerate(rows) if row.key == key), 0)

    def first_visible_row(self, part: ListKind, rows: Sequence[ListRow], room: int) -> int:
        """Return the number of the first visible row."""
        self._tops[part] = first_visible(self.cursor_row(part, rows), len(rows), max(1, room), self._tops[part])
        return self._tops[part]

    def move_cursor(self, rows: Rows, by: int) -> None:
        """Move down by *by* rows, or lines of a text."""
        if self.opened_job or self.is_help_open:
            self.scroll_offset = max(0, min(self.scroll_offset + by, END))
            return
        mine = rows[self.list_kind]
        if mine:
            number = self.cursor_row(self.list_kind, mine) + by
            self._cursors[self.list_kind] = mine[max(0, min(number, len(mine) - 1))].key

    def change_list(self, steps: int) -> None:
        """Go to the next list, or with -1 to the previous one."""
        self.list_kind = _PARTS[(_PARTS.index(self.list_kind) + steps) % len(_PARTS)]

    def next_order(self, orders: Sequence[str]) -> None:
        """Switch to the next order of the list."""
        self.orders[self.list_kind] = (self.orders[self.list_kind] + 1) % len(orders)
        self.reversed_lists.discard(self.list_kind)

    def reverse_order(self) -> None:
        """Reverse the order."""
        self.reversed_lists ^= {self.list_kind}

    def open_job(self, rows: Rows) -> None:
        """Show the job under the cursor alone."""
        jobs = rows[ListKind.JOBS]
        if self.list_kind is ListKind.JOBS and jobs and not self.is_help_open:
            self.opened_job, self.scroll_offset = jobs[self.cursor_row(ListKind.JOBS, jobs)].key, 0

    def toggle_help(self) -> None:
        """Toggle the help."""
        self.is_help_open, self.scroll_offset = not self.is_help_open, 0

    def go_back(self) -> None:
        """Close what is open, or else clear the filter."""
        if self.is_help_open or self.opened_job:
            self.is_help_open, self.opened_job, self.scroll_offset = False, "", 0
        else:
            self.filter_text = ""
