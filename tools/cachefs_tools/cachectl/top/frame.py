"""Renders the picture as lines of text for a terminal of a given size."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from cachefs.counts import counted, duration
from cachefs.messages import TierStatus
from cachefs.troubles import words
from cachefs_tools.cachectl.display import facts, share, size
from cachefs_tools.cachectl.job_page import describe
from cachefs_tools.cachectl.tables import ELLIPSIS, GAP, Kind, fit, shortened
from cachefs_tools.cachectl.top.history import History
from cachefs_tools.cachectl.top.lists import LISTINGS, Listing, Part, Row, arranged
from cachefs_tools.cachectl.top.pen import Pen
from cachefs_tools.cachectl.top.picture import Picture
from cachefs_tools.cachectl.top.room import shared
from cachefs_tools.cachectl.top.state import State
from cachefs_tools.names import escape

# Fewest columns and lines in which anything can be shown.
NARROWEST, LOWEST = 40, 10
# Lines from which there is an empty line above each list.
_ROOMY: Final = 30
_LABEL: Final = 8
# Most lines of problems.
MOST_TROUBLES: Final = 3
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
class View:
    """The known state of the node."""

    picture: Picture
    history: History
    problem: str = ""  # why the picture is old

    def listings(self, pen: Pen) -> dict[Part, Listing]:
        return {part: make(self.picture, self.history, pen) for part, make in LISTINGS.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """A rendered picture."""

    lines: list[Text]
    # All rows of each list, in order; and names of the visible datasets.
    rows: Mapping[Part, Sequence[Row]]
    datasets: Sequence[str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Size and drawing characters of the output."""

    width: int
    height: int
    pen: Pen


def frame(view: View, state: State, sheet: Sheet) -> Frame:
    """Render the picture with the sheet's number of lines."""
    listings = view.listings(sheet.pen)
    rows = {
        part: arranged(listing, state.orders[part], state.needle, turned=part in state.turned)
        for part, listing in listings.items()
    }
    if sheet.width < NARROWEST or sheet.height < LOWEST:
        return _finished([_line(f"at least {NARROWEST} x {LOWEST}, please", sheet.width)], rows, [], sheet)
    lines = list(_head(view, sheet))
    room = sheet.height - len(lines) - 1
    shown: list[str] = []
    if state.helping:
        lines += _scrolled(text_of([facts(HELP)], sheet.width), state, room)
    elif state.opened:
        lines += _scrolled(_job(view.picture, state.opened, sheet.width), state, room)
    else:
        for part, (below, seen) in _lists(listings, rows, state, sheet, room).items():
            lines += below
            shown += [row.key for row in seen] if part is Part.DATASETS else []
    lines += [Text(end="")] * (sheet.height - 1 - len(lines))
    lines.append(_line(_foot(state), sheet.width, "reverse"))
    return _finished(lines, rows, shown, sheet)


def _finished(lines: list[Text], rows: Mapping[Part, list[Row]], shown: list[str], sheet: Sheet) -> Frame:
    for line in lines:
        line.plain = line.plain.replace(ELLIPSIS, sheet.pen.ellipsis)
    return Frame(lines[: sheet.height], rows, shown)


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(text, end="")
    line.truncate(width, overflow="ellipsis")
    return _styled(line, width, style)


def _styled(line: Text, width: int, style: str) -> Text:
    if "reverse" in style:
        line.pad_right(max(0, width - line.cell_len))
    line.stylize(style)
    return line


def _foot(state: State) -> str:
    if state.helping or state.opened:
        return "Esc back  q quit  Up, Down move"
    return f"filter: {state.needle}  (Esc shows all)" if state.needle else KEYS


# --- head -----------------------------------------------------------------------------------------------------------


def _head(view: View, sheet: Sheet) -> Iterator[Text]:
    status, width = view.picture.status, sheet.width
    counts = ((len(status.causes or status.errors), "error", ""), (status.warmups, "warmup", ""),
              (status.in_flight_blocks, "block coming", "blocks coming"))  # fmt: skip
    said = ", ".join(
        [f"cachefsd {status.version}", f"up {duration(status.uptime)}"]
        + [counted(count, noun, plural) for count, noun, plural in counts if count]
    )
    clock = time.strftime("%H:%M:%S", time.localtime(view.picture.clock))
    title = Text.assemble(("cachectl top", "bold"), f"  {said}", end="")
    title.truncate(max(0, width - len(clock) - 1))
    title.append(" " * (width - title.cell_len - len(clock)) + clock)
    yield title
    if view.problem:
        yield _line(f"old, of {clock}: {view.problem}", width, "reverse")
    reads = sum(tier.hits for tier in status.tiers) + status.misses
    for tier in status.tiers:
        yield _tier(tier, view.history, reads, sheet)
    origin = f"{_rate(view.history.rate('origin'))}, at most {_rate(max(view.history.flows['origin'], default=0.0))}"
    yield _flow("origin", "origin", origin, view.history, sheet)
    if status.cluster.source != "none":
        peers = f"{_rate(view.history.rate('peers in'))} in, {_rate(view.history.rate('peers out'))} out"
        yield _flow("peers", "peers in", peers, view.history, sheet)
    reading = f"{view.history.rate('reads'):,.0f}/s, {view.history.rate('misses'):,.0f}/s waited for a fetch"
    yield _flow("reads", "reads", reading, view.history, sheet)
    for trouble in status.troubles[:MOST_TROUBLES]:
        yield _line(f"! {escape(words(trouble, view.picture.clock))}", width, "yellow")


def _tier(tier: TierStatus, history: History, reads: int, sheet: Sheet) -> Text:
    part = tier.used / tier.limit if tier.limit else 0.0
    used = f"{size(tier.used)} of {size(tier.limit)}"
    hits = f"{history.hits.get(tier.name, 0.0):,.0f} hits/s, {share(tier.hits, reads)} of all"
    wide = max(8, (sheet.width - 64) // 2 + 10)
    line = Text(f"{tier.name:<{_LABEL}}", end="")
    line.append(sheet.pen.bar(part, wide), style="red" if tier.problem else "green")
    line.append(f" {used:>20} {100 * part:3.0f} %  {escape(tier.problem) or hits}")
    line.truncate(sheet.width)
    return line


def _flow(label: str, flow: str, said: str, history: History, sheet: Sheet) -> Text:
    line = Text(f"{label:<{_LABEL}}", end="")
    line.append(sheet.pen.curve(history.flows[flow], max(8, sheet.width - _LABEL - 36)), style="cyan")
    line.append(f" {said}")
    line.truncate(sheet.width)
    return line


def _rate(count: float) -> str:
    return f"{size(count)}/s"


# --- lists ----------------------------------------------------------------------------------------------------------


def _lists(
    listings: Mapping[Part, Listing], rows: Mapping[Part, list[Row]], state: State, sheet: Sheet, room: int
) -> dict[Part, tuple[list[Text], list[Row]]]:
    """Return by list its lines, and the visible rows."""
    space = 1 if sheet.height >= _ROOMY else 0
    wanted = [max(1, len(rows[part])) for part in listings]
    given = shared(room - len(listings) * (1 + space), wanted, list(listings).index(state.part))
    found = {}
    for (part, listing), most in zip(listings.items(), given, strict=True):
        top = state.top(part, rows[part], most)
        seen = rows[part][top : top + most]
        lines = [Text(end="")] * space + list(_table(listing, rows[part], top, seen, state, sheet))
        found[part] = lines[: space + 1 + most], seen
    return found


def _table(
    listing: Listing, rows: Sequence[Row], top: int, seen: Sequence[Row], state: State, sheet: Sheet
) -> Iterator[Text]:
    has_cursor = state.part is listing.part
    headings = [_heading(column.heading, listing, state, sheet.pen) for column in listing.columns]
    count = f" {top + 1}-{top + len(seen)} of {len(rows)}" if len(seen) < len(rows) else f" {len(rows)}"
    headings[0] += count if rows else ""
    natural = [max([cell_len(head), *(cell_len(row.cells[at]) for row in rows)]) for at, head in enumerate(headings)]
    shown = fit(listing.columns, natural, sheet.width - 2)
    yield _row(("  ", headings), listing, shown, sheet, "bold reverse" if has_cursor else "bold")
    if not rows:
        yield _line("  none" if not state.needle else f"  none with {state.needle!r}", sheet.width, "dim")
    cursor = state.cursor(listing.part, rows)
    for number, row in enumerate(seen, top):
        is_here = has_cursor and number == cursor
        style = "reverse" if is_here else "yellow" if row.alarm else "dim" if row.faint else ""
        yield _row(("> " if is_here else "! " if row.alarm else "  ", row.cells), listing, shown, sheet, style)


def _heading(heading: str, listing: Listing, state: State, pen: Pen) -> str:
    """Return a heading, with an arrow if the list is sorted by this column."""
    order = state.orders[listing.part] % len(listing.orders)
    if listing.orders[order] != heading:
        return heading
    rises = (order == 0) != (listing.part in state.turned)
    return heading + (pen.up if rises else pen.down)


def _row(
    marked: tuple[str, Sequence[str]], listing: Listing, shown: Mapping[int, int], sheet: Sheet, style: str
) -> Text:
    mark, cells = marked
    line = Text(mark, end="")
    for at, width in shown.items():
        cell = shortened(cells[at], width)
        gap = " " * (width - cell_len(cell))
        line.append((gap + cell if listing.columns[at].kind is Kind.NUMBER else cell + gap) + " " * GAP)
    line.truncate(sheet.width)
    return _styled(line, sheet.width, style)


# --- texts ----------------------------------------------------------------------------------------------------------


def _job(picture: Picture, wanted: str, width: int) -> list[str]:
    view = next((one for one in picture.jobs.jobs if one.job == wanted), None)
    return [f"there is no job {escape(wanted)} any more"] if view is None else text_of(describe(view), width)


def text_of(what: Iterable[RenderableType], width: int) -> list[str]:
    """Render lines and tables for a terminal of that width."""
    console = Console(width=width, color_system=None, highlight=False, markup=False, emoji=False, force_terminal=False)
    with console.capture() as captured:
        for each in what:
            console.print(each)
    return [line.rstrip() for line in captured.get().splitlines()]


def _scrolled(texts: Sequence[str], state: State, room: int) -> list[Text]:
    state.scrolled = max(0, min(state.scrolled, len(texts) - room))
    return [Text(text, end="") for text in texts[state.scrolled : state.scrolled + room]]
