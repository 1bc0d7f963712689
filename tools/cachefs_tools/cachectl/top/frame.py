"""Renders the picture as lines of text for a terminal of a given size."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from cachefs.formatting import format_count, format_duration
from cachefs.messages import TierStatus, WarmupProgress
from cachefs.trouble_texts import describe_trouble
from cachefs_tools.cachectl.display import (
    ELLIPSIS,
    GAP,
    ColumnKind,
    fit_columns,
    labelled_lines,
    share,
    shorten_middle,
    size,
)
from cachefs_tools.cachectl.job_page import describe
from cachefs_tools.cachectl.top.glyphs import Glyphs
from cachefs_tools.cachectl.top.history import RateHistory
from cachefs_tools.cachectl.top.lists import (
    LIST_MAKERS,
    ListKind,
    ListRow,
    ShownList,
    TopState,
    arrange_rows,
    divide_lines,
)
from cachefs_tools.cachectl.top.picture import Picture
from cachefs_tools.escaped_names import escape_name

# Fewest columns and lines in which anything can be shown.
MIN_WIDTH, MIN_HEIGHT = 40, 10
# Lines from which there is an empty line above each list.
_SPACED_HEIGHT: Final = 30
_LABEL: Final = 8
# Most lines of problems.
MAX_TROUBLES: Final = 3
MAX_WARMUPS: Final = 3
KEYS: Final = "q quit  ? help  Tab list  Enter job  s sort  r turn  / filter"
HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("Tab", "go to the next list; Shift-Tab to the one before"),
    ("Up, Down", "move the cursor; k, j, PgUp, PgDn, Home and End too"),
    ("Enter", "show the job under the cursor alone; Esc goes back"),
    ("s", "sort the list by its next column; r turns the order round"),
    ("/", "show only what has a text in its name or state; Esc shows all"),
    ("", ""),
    ("origin", "bytes a second from origins. The top of a curve is its highest point"),
    ("peers", "bytes a second from other nodes of the cluster, and to them"),
    ("reads", "reads that the kernel's page cache did not answer"),
    ("DONE", "how much of its epoch the slowest consumer of a job has read"),
    (
        "WAITED",
        "share of the last 10 s that the job's loop waited for data; WHY: for what reads wait, or why they fail",
    ),
    ("RATE, LEFT", "samples a second, of the last 10 s; how long the epoch still takes so"),
    ("CACHED", "about how much of a dataset is here: from a sample of its blocks"),
    ("!", "something is wrong: a job that waits, a mount whose process is gone"),
)


@dataclass(frozen=True, slots=True)
class ShownNode:
    """The known state of the node."""

    picture: Picture
    history: RateHistory
    problem: str = ""  # why the picture is old

    def lists(self, pen: Glyphs) -> dict[ListKind, ShownList]:
        return {part: make(self.picture, self.history, pen) for part, make in LIST_MAKERS.items()}


@dataclass(frozen=True, slots=True)
class RenderedFrame:
    """A rendered picture."""

    lines: list[Text]
    # All rows of each list, in order; and names of the visible datasets.
    rows: Mapping[ListKind, Sequence[ListRow]]
    datasets: Sequence[str]


@dataclass(frozen=True, slots=True)
class DrawingArea:
    """Size and drawing characters of the output."""

    width: int
    height: int
    glyphs: Glyphs


def render_frame(node: ShownNode, state: TopState, area: DrawingArea) -> RenderedFrame:
    """Render the picture with the sheet's number of lines."""
    listings = node.lists(area.glyphs)
    rows = {
        part: arrange_rows(listing, state.orders[part], state.filter_text, is_reversed=part in state.reversed_lists)
        for part, listing in listings.items()
    }
    if area.width < MIN_WIDTH or area.height < MIN_HEIGHT:
        return _finish_frame([_line(f"too small: at least {MIN_WIDTH} x {MIN_HEIGHT}", area.width)], rows, [], area)
    lines = list(_head_lines(node, area))
    room = area.height - len(lines) - 1
    shown: list[str] = []
    if state.is_help_open:
        lines += _visible_lines(render_text([labelled_lines(HELP)], area.width), state, room)
    elif state.opened_job:
        lines += _visible_lines(_job_lines(node.picture, state.opened_job, area.width), state, room)
    else:
        for part, (below, seen) in _list_lines(listings, rows, state, area, room).items():
            lines += below
            shown += [row.key for row in seen] if part is ListKind.DATASETS else []
    lines += [Text(end="")] * (area.height - 1 - len(lines))
    lines.append(_line(_footer(state), area.width, "reverse"))
    return _finish_frame(lines, rows, shown, area)


def _finish_frame(
    lines: list[Text], rows: Mapping[ListKind, list[ListRow]], shown: list[str], sheet: DrawingArea
) -> RenderedFrame:
    for line in lines:
        line.plain = line.plain.replace(ELLIPSIS, sheet.glyphs.ellipsis)
    return RenderedFrame(lines[: sheet.height], rows, shown)


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(text, end="")
    line.truncate(width, overflow="ellipsis")
    return _styled(line, width, style)


def _styled(line: Text, width: int, style: str) -> Text:
    if "reverse" in style:
        line.pad_right(max(0, width - line.cell_len))
    line.stylize(style)
    return line


def _footer(state: TopState) -> str:
    if state.is_help_open or state.opened_job:
        return "Esc back  q quit  Up, Down move"
    return f"filter: {state.filter_text}  (Esc shows all)" if state.filter_text else KEYS


# --- head -----------------------------------------------------------------------------------------------------------


def _head_lines(view: ShownNode, sheet: DrawingArea) -> Iterator[Text]:
    status, width = view.picture.status, sheet.width
    counts = ((len(status.causes or status.errors), "error", ""), (status.warmups, "warmup", ""),
              (status.in_flight_blocks, "block coming", "blocks coming"))  # fmt: skip
    text = ", ".join(
        [f"cachefsd {status.version}", f"up {format_duration(status.uptime)}"]
        + [format_count(count, noun, plural) for count, noun, plural in counts if count]
    )
    clock = time.strftime("%H:%M:%S", time.localtime(view.picture.unix_time))
    title = Text.assemble(("cachectl top", "bold"), f"  {text}", end="")
    title.truncate(max(0, width - len(clock) - 1))
    title.append(" " * (width - title.cell_len - len(clock)) + clock)
    yield title
    if view.problem:
        yield _line(f"old, of {clock}: {view.problem}", width, "reverse")
    reads = sum(tier.hits for tier in status.tiers) + status.misses
    for tier in status.tiers:
        yield _tier_line(tier, view.history, reads, sheet)
    origin = f"{_rate(view.history.rate('origin'))}, at most {_rate(max(view.history.flows['origin'], default=0.0))}"
    yield _flow_line("origin", "origin", origin, view.history, sheet)
    if status.cluster.source != "none":
        peers = f"{_rate(view.history.rate('peers in'))} in, {_rate(view.history.rate('peers out'))} out"
        yield _flow_line("peers", "peers in", peers, view.history, sheet)
    reading = f"{view.history.rate('reads'):,.0f}/s, {view.history.rate('misses'):,.0f}/s waited for a fetch"
    yield _flow_line("reads", "reads", reading, view.history, sheet)
    for warmup in status.running_warmups[:MAX_WARMUPS]:
        yield _warmup_line(warmup, sheet)
    for trouble in status.troubles[:MAX_TROUBLES]:
        yield _line(f"! {escape_name(describe_trouble(trouble, view.picture.unix_time))}", width, "yellow")


def _tier_line(tier: TierStatus, history: RateHistory, reads: int, sheet: DrawingArea) -> Text:
    part = tier.used / tier.limit if tier.limit else 0.0
    used = f"{size(tier.used)} of {size(tier.limit)}"
    hits = f"{history.hits.get(tier.name, 0.0):,.0f} hits/s, {share(tier.hits, reads)} of all"
    wide = max(8, (sheet.width - 64) // 2 + 10)
    line = Text(f"{tier.name:<{_LABEL}}", end="")
    line.append(sheet.glyphs.draw_bar(part, wide), style="red" if tier.problem else "green")
    line.append(f" {used:>20} {100 * part:3.0f} %  {escape_name(tier.problem) or hits}")
    line.truncate(sheet.width)
    return line


def _warmup_line(warmup: WarmupProgress, sheet: DrawingArea) -> Text:
    part = warmup.bytes / warmup.bytes_total if warmup.bytes_total else 0.0
    where = f"{escape_name(warmup.dataset)}{' on all nodes' if warmup.cluster else ''}"
    wide = max(8, (sheet.width - 64) // 2 + 10)
    line = Text(f"{'warmup':<{_LABEL}}", end="")
    line.append(sheet.glyphs.draw_bar(part, wide), style="cyan")
    line.append(f" {f'{size(warmup.bytes)} of {size(warmup.bytes_total)}':>20} {100 * part:3.0f} %  {where}")
    line.append(f"; {escape_name(warmup.reason)}" if warmup.reason else "")
    line.truncate(sheet.width)
    return line


def _flow_line(label: str, flow: str, text: str, history: RateHistory, sheet: DrawingArea) -> Text:
    line = Text(f"{label:<{_LABEL}}", end="")
    line.append(sheet.glyphs.draw_curve(history.flows[flow], max(8, sheet.width - _LABEL - 36)), style="cyan")
    line.append(f" {text}")
    line.truncate(sheet.width)
    return line


def _rate(count: float) -> str:
    return f"{size(count)}/s"


# --- lists ----------------------------------------------------------------------------------------------------------


def _list_lines(
    listings: Mapping[ListKind, ShownList],
    rows: Mapping[ListKind, list[ListRow]],
    state: TopState,
    sheet: DrawingArea,
    room: int,
) -> dict[ListKind, tuple[list[Text], list[ListRow]]]:
    """Return by list its lines, and the visible rows."""
    space = 1 if sheet.height >= _SPACED_HEIGHT else 0
    wanted = [max(1, len(rows[part])) for part in listings]
    line_counts = divide_lines(room - len(listings) * (1 + space), wanted, list(listings).index(state.list_kind))
    found = {}
    for (part, listing), most in zip(listings.items(), line_counts, strict=True):
        top = state.first_visible_row(part, rows[part], most)
        seen = rows[part][top : top + most]
        lines = [Text(end="")] * space + list(_table(listing, rows[part], top, seen, state, sheet))
        found[part] = lines[: space + 1 + most], seen
    return found


def _table(
    listing: ShownList, rows: Sequence[ListRow], top: int, seen: Sequence[ListRow], state: TopState, sheet: DrawingArea
) -> Iterator[Text]:
    has_cursor = state.list_kind is listing.kind
    headings = [_heading(column.heading, listing, state, sheet.glyphs) for column in listing.columns]
    count = f" {top + 1}-{top + len(seen)} of {len(rows)}" if len(seen) < len(rows) else f" {len(rows)}"
    headings[0] += count if rows else ""
    natural = [max([cell_len(head), *(cell_len(row.cells[at]) for row in rows)]) for at, head in enumerate(headings)]
    shown = fit_columns(listing.columns, natural, sheet.width - 2)
    yield _row(("  ", headings), listing, shown, sheet, "bold reverse" if has_cursor else "bold")
    if not rows:
        yield _line("  none" if not state.filter_text else f"  none with {state.filter_text!r}", sheet.width, "dim")
    cursor = state.cursor_row(listing.kind, rows)
    for number, row in enumerate(seen, top):
        is_here = has_cursor and number == cursor
        style = "reverse" if is_here else "yellow" if row.alarm else "dim" if row.faint else ""
        yield _row(("> " if is_here else "! " if row.alarm else "  ", row.cells), listing, shown, sheet, style)


def _heading(heading: str, listing: ShownList, state: TopState, pen: Glyphs) -> str:
    """Return a heading, with an arrow if the list is sorted by this column."""
    order = state.orders[listing.kind] % len(listing.orders)
    if listing.orders[order] != heading:
        return heading
    rises = (order == 0) != (listing.kind in state.reversed_lists)
    return heading + (pen.up if rises else pen.down)


def _row(
    marked: tuple[str, Sequence[str]], listing: ShownList, shown: Mapping[int, int], sheet: DrawingArea, style: str
) -> Text:
    mark, cells = marked
    line = Text(mark, end="")
    for at, width in shown.items():
        cell = shorten_middle(cells[at], width)
        gap = " " * (width - cell_len(cell))
        line.append((gap + cell if listing.columns[at].kind is ColumnKind.NUMBER else cell + gap) + " " * GAP)
    line.truncate(sheet.width)
    return _styled(line, sheet.width, style)


# --- texts ----------------------------------------------------------------------------------------------------------


def _job_lines(picture: Picture, wanted: str, width: int) -> list[str]:
    view = next((job for job in picture.jobs.jobs if job.job == wanted), None)
    return [f"there is no job {escape_name(wanted)} any more"] if view is None else render_text(describe(view), width)


def render_text(what: Iterable[RenderableType], width: int) -> list[str]:
    """Render lines and tables for a terminal of that width."""
    console = Console(width=width, color_system=None, highlight=False, markup=False, emoji=False, force_terminal=False)
    with console.capture() as captured:
        for each in what:
            console.print(each)
    return [line.rstrip() for line in captured.get().splitlines()]


def _visible_lines(texts: Sequence[str], state: TopState, room: int) -> list[Text]:
    state.scroll_offset = max(0, min(state.scroll_offset, len(texts) - room))
    return [Text(text, end="") for text in texts[state.scroll_offset : state.scroll_offset + room]]
