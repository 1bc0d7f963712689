"""Formats numbers, names and tables for a terminal.

`table` makes a table that fits the terminal from a line such as `"NAME =STATE >RATE? ~MESSAGE"`; see `TableColumn`.
Less important columns are left out, and words are not broken.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

# Blanks between two columns.
GAP: Final = 1
# Characters after which a long name may be broken.
_BREAKABLE: Final = re.compile(r"[/,:;_.@~=+-]*[^/,:;_.@~=+-]+[/,:;_.@~=+-]?|[/,:;_.@~=+-]+")
ELLIPSIS: Final = "…"


class ColumnKind(StrEnum):
    """Kind of a column's contents, by the character in front of its heading. Determines how wide the column may be."""

    NAME = ""  # a name or path: broken after a `/`, `-` or the like if it is too long
    WORD = "="  # a word: never cut
    NUMBER = ">"  # a number: never cut, and aligned to the right
    PROSE = "~"  # text: broken at blanks


# Width of names and texts below which other columns are left out, and their least width.
_COMFORTABLE_WIDTH: Final = {ColumnKind.NAME: 24, ColumnKind.PROSE: 28}
_MIN_WIDTH: Final = {ColumnKind.NAME: 10, ColumnKind.PROSE: 12}


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table."""

    heading: str
    kind: ColumnKind = ColumnKind.NAME
    # 0: always shown. Columns with the highest number are left out first, the last of them before the others.
    optional_level: int = 0

    @classmethod
    def parse_heading(cls, text: str) -> "TableColumn":
        """Parse a heading with the sign of its kind in front, and a `?` for each level of `optional_level`."""
        heading = text.rstrip("?")
        kind = ColumnKind(heading[0]) if heading[:1] in ("=", ">", "~") else ColumnKind.NAME
        return cls(heading[len(kind) :], kind, len(text) - len(heading))


def fit_columns(columns: Sequence[TableColumn], natural: Sequence[int], room: int) -> dict[int, int]:
    """Return the columns that fit into *room*, and their widths: index -> width.

    natural: the full width of each column. If even the mandatory columns do not fit with their least widths, the result
    is wider than *room*.
    """
    easy = [min(width, _COMFORTABLE_WIDTH.get(one.kind, width)) for one, width in zip(columns, natural, strict=True)]
    shown = dict(enumerate(easy))
    while _width(shown) > room and (spare := [index for index in shown if columns[index].optional_level]):
        del shown[max(spare, key=lambda index: (columns[index].optional_level, index))]
    flexible = [index for index in shown if columns[index].kind in _COMFORTABLE_WIDTH]
    while (lacking := _width(shown) - room) > 0:
        widest = max(flexible, key=lambda index: shown[index] - _MIN_WIDTH[columns[index].kind], default=None)
        if widest is None or (more := shown[widest] - _MIN_WIDTH[columns[widest].kind]) <= 0:
            break
        shown[widest] -= min(more, max(1, lacking // len(flexible)))
    for left, index in enumerate(sorted(flexible, key=lambda index: natural[index] - shown[index])):
        shown[index] += min(natural[index] - shown[index], max(0, room - _width(shown)) // (len(flexible) - left))
    return shown


def _width(shown: dict[int, int]) -> int:
    return sum(shown.values()) + GAP * max(0, len(shown) - 1)


def wrap_text(text: str, width: int) -> list[str]:
    """Break a text into lines of that width: at blanks; a longer word behind a `/`, `-` and the like; and an even
    longer piece anywhere."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        fits = cell_len(word) <= width
        parts = [word] if fits else _BREAKABLE.findall(word)
        glue = "" if fits or not lines[-1] else " "
        for part in parts:
            if not fits and cell_len(lines[-1] + glue + part) <= width:
                lines[-1] += glue + part
            else:
                *full, remainder = _cut_pieces(part, width)
                lines += [*full, remainder]
            glue = ""
    return [line for line in lines if line] or [""]


def _cut_pieces(text: str, width: int) -> list[str]:
    pieces = [""]
    for letter in text:
        if pieces[-1] and cell_len(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def shorten_middle(text: str, width: int) -> str:
    """Shorten a text to that width by leaving out its middle, since names often differ at the end."""
    if cell_len(text) <= width:
        return text
    if width <= len(ELLIPSIS):
        return ELLIPSIS[: max(0, width)]
    back = (width - len(ELLIPSIS)) // 2
    front = width - len(ELLIPSIS) - back
    end = _cut_pieces(text[::-1], back)[0][::-1] if back else ""
    return _cut_pieces(text, front)[0] + ELLIPSIS + end


class FittedTable(Table):
    """A table without lines, which is fitted when it is printed and the width is known."""

    def __init__(
        self, columns: Sequence[TableColumn], rows: Iterable[Iterable[object]], *, heading: bool = True
    ) -> None:
        super().__init__(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_header=heading)
        self._kinds = columns
        self._cells = [[str(cell) for cell in row] for row in rows]
        for column in columns:
            self.add_column(column.heading)
        for row in self._cells:
            self.add_row(*row)
        heads = [cell_len(column.heading) if heading else 0 for column in columns]
        self._natural = [max([head, *map(cell_len, cells)]) for head, *cells in zip(heads, *self._cells, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = fit_columns(self._kinds, self._natural, options.max_width)
        lines = Table(
            box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_header=self.show_header
        )
        for index, width in shown.items():
            column = self._kinds[index]
            lines.add_column(
                column.heading,
                justify="right" if column.kind is ColumnKind.NUMBER else "left",
                width=width,
                no_wrap=True,
            )
        for row in self._cells:
            lines.add_row(*("\n".join(wrap_text(row[index], width)) for index, width in shown.items()))
        yield lines


def size(count: float) -> str:
    """Format bytes in binary units with three digits, such as `1.46 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"


def compact(number: float, width: int) -> str:
    """Format a number of at least 0 in *width* characters, at least 4: whole, or in thousands (`12.3k`) and so on."""
    if len(rounded := f"{number:.0f}") <= width:
        return rounded
    units = iter("kMGTP")
    unit = ""
    while number >= 999.5:
        number, unit = number / 1000, next(units)
    decimals = 1 if len(f"{number:.1f}") < width else 0
    return f"{number:.{decimals}f}{unit}"


def share(part: float, total: float) -> str:
    """Format a share in percent, or `-` if the whole is 0."""
    return f"{100 * part / total:.1f} %" if total else "-"


def table(columns: str, rows: Iterable[Iterable[object]], *, heading: bool = True) -> FittedTable:
    """Make a table that fits the terminal. All tables of cachectl are made here.

    columns: the headings, separated by blanks. The character in front of a heading tells the kind of its column: `>`
    for numbers, `=` for words (neither is ever cut), `~` for text, and nothing for names. `?` behind the heading: on a
    narrow terminal the column is left out, those with more `?` first. heading: whether headings are shown.
    """
    return FittedTable([TableColumn.parse_heading(text) for text in columns.split()], rows, heading=heading)


def labelled_lines(pairs: Iterable[tuple[str, str]]) -> FittedTable:
    """Make lines of a label and a text each. A long text continues below itself."""
    return table("=LABEL ~TEXT", ((f"{label:<10}", text) for label, text in pairs), heading=False)
