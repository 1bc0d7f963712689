"""Tables that fit a terminal: columns are left out by importance, and words are not broken.

`display.table` makes them from a line such as `"NAME =STATE >RATE? ~MESSAGE"`; see `Column`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

# Columns of the terminal between two columns of a table.
GAP: Final = 1
# Characters behind which a long name may go on in the next line.
_SEAMS: Final = re.compile(r"[/,:;_.@~=+-]*[^/,:;_.@~=+-]+[/,:;_.@~=+-]?|[/,:;_.@~=+-]+")
ELLIPSIS: Final = "…"


class Kind(StrEnum):
    """What a column holds, by the character in front of its heading. How wide the column may be follows from that."""

    NAME = ""  # a name or path: where it is too long, it goes on in the next line behind a `/`, `-` or the like
    WORD = "="  # a word: never cut
    NUMBER = ">"  # a number: never cut, and aligned to the right
    PROSE = "~"  # text: goes on in the next line at a blank


# How many columns of the terminal a name and a text have before others are left out for them, and the fewest.
_EASY: Final = {Kind.NAME: 24, Kind.PROSE: 28}
_LEAST: Final = {Kind.NAME: 10, Kind.PROSE: 12}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    kind: Kind = Kind.NAME
    # 0: it is always shown. Those with the highest number are left out first, and of several the last one.
    spare: int = 0

    @classmethod
    def parse(cls, text: str) -> "Column":
        """The column of a heading with the sign of its kind in front, and as many `?` behind as it is spare."""
        heading = text.rstrip("?")
        kind = Kind(heading[0]) if heading[:1] in ("=", ">", "~") else Kind.NAME
        return cls(heading[len(kind) :], kind, len(text) - len(heading))


def fit(columns: Sequence[Column], natural: Sequence[int], room: int) -> dict[int, int]:
    """Which columns are shown in *room* columns of a terminal, and how wide: index -> width.

    natural: the width that each would take. Where not even the columns that are never left out find room with their
    least width, they are wider than *room*.
    """
    easy = [min(width, _EASY.get(one.kind, width)) for one, width in zip(columns, natural, strict=True)]
    shown = dict(enumerate(easy))
    while _width(shown) > room and (spare := [index for index in shown if columns[index].spare]):
        del shown[max(spare, key=lambda index: (columns[index].spare, index))]
    flexible = [index for index in shown if columns[index].kind in _EASY]
    while (lacking := _width(shown) - room) > 0:
        widest = max(flexible, key=lambda index: shown[index] - _LEAST[columns[index].kind], default=None)
        if widest is None or (more := shown[widest] - _LEAST[columns[widest].kind]) <= 0:
            break
        shown[widest] -= min(more, max(1, lacking // len(flexible)))
    for left, index in enumerate(sorted(flexible, key=lambda index: natural[index] - shown[index])):
        shown[index] += min(natural[index] - shown[index], max(0, room - _width(shown)) // (len(flexible) - left))
    return shown


def _width(shown: dict[int, int]) -> int:
    return sum(shown.values()) + GAP * max(0, len(shown) - 1)


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of that width: broken at blanks; a word that is longer behind a `/`, `-` and the like; and what
    is longer still anywhere."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        whole = cell_len(word) <= width
        parts = [word] if whole else _SEAMS.findall(word)
        glue = "" if whole or not lines[-1] else " "
        for part in parts:
            if not whole and cell_len(lines[-1] + glue + part) <= width:
                lines[-1] += glue + part
            else:
                *full, rest = _cut(part, width)
                lines += [*full, rest]
            glue = ""
    return [line for line in lines if line] or [""]


def _cut(text: str, width: int) -> list[str]:
    pieces = [""]
    for letter in text:
        if pieces[-1] and cell_len(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def shortened(text: str, width: int) -> str:
    """The text in one line of that width. Of a longer one the middle is left out, as names often differ at the end."""
    if cell_len(text) <= width:
        return text
    if width <= len(ELLIPSIS):
        return ELLIPSIS[: max(0, width)]
    back = (width - len(ELLIPSIS)) // 2
    front = width - len(ELLIPSIS) - back
    end = _cut(text[::-1], back)[0][::-1] if back else ""
    return _cut(text, front)[0] + ELLIPSIS + end


class FittedTable(Table):
    """A table without lines, which is fitted when it is printed and the width is known."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Iterable[object]], *, heading: bool = True) -> None:
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
        shown = fit(self._kinds, self._natural, options.max_width)
        lines = Table(
            box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_header=self.show_header
        )
        for index, width in shown.items():
            column = self._kinds[index]
            lines.add_column(
                column.heading, justify="right" if column.kind is Kind.NUMBER else "left", width=width, no_wrap=True
            )
        for row in self._cells:
            lines.add_row(*("\n".join(wrapped(row[index], width)) for index, width in shown.items()))
        yield lines
