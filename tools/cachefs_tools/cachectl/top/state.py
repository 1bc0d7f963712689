"""The user's choices in the picture: list, row, order, and opened item."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs_tools.cachectl.top.lists import Part, Row
from cachefs_tools.cachectl.top.room import window

# More rows than any list has: moves to its end.
ALL: Final = 1 << 30
_PARTS: Final = list(Part)

Rows = Mapping[Part, Sequence[Row]]


@dataclass(slots=True)
class State:
    """State changed by keys only."""

    part: Part = Part.JOBS  # the list with the cursor
    orders: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))  # see `lists.arranged`
    turned: set[Part] = field(default_factory=set)
    needle: str = ""  # rows without this text are left out
    opened: str = ""  # the job shown alone; empty: none
    scrolled: int = 0  # hidden lines above the opened job or the help
    helping: bool = False
    # By list: key of the row with the cursor, and number of the first visible row.
    _cursors: dict[Part, str] = field(default_factory=dict)
    _tops: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def cursor(self, part: Part, rows: Sequence[Row]) -> int:
        """Return the number of the row with the cursor, which follows its item as others come and go."""
        key = self._cursors.get(part)
        return next((number for number, row in enumerate(rows) if row.key == key), 0)

    def top(self, part: Part, rows: Sequence[Row], room: int) -> int:
        """Return the number of the first visible row."""
        self._tops[part] = window(self.cursor(part, rows), len(rows), max(1, room), self._tops[part])
        return self._tops[part]

    def move(self, rows: Rows, by: int) -> None:
        """Move down by *by* rows, or lines of a text."""
        if self.opened or self.helping:
            self.scrolled = max(0, min(self.scrolled + by, ALL))
            return
        mine = rows[self.part]
        if mine:
            number = self.cursor(self.part, mine) + by
            self._cursors[self.part] = mine[max(0, min(number, len(mine) - 1))].key

    def go(self, steps: int) -> None:
        """Go to the next list, or with -1 to the previous one."""
        self.part = _PARTS[(_PARTS.index(self.part) + steps) % len(_PARTS)]

    def sort(self, orders: Sequence[str]) -> None:
        """Switch to the next order of the list."""
        self.orders[self.part] = (self.orders[self.part] + 1) % len(orders)
        self.turned.discard(self.part)

    def turn(self) -> None:
        """Reverse the order."""
        self.turned ^= {self.part}

    def open(self, rows: Rows) -> None:
        """Show the job under the cursor alone."""
        jobs = rows[Part.JOBS]
        if self.part is Part.JOBS and jobs and not self.helping:
            self.opened, self.scrolled = jobs[self.cursor(Part.JOBS, jobs)].key, 0

    def help(self) -> None:
        """Toggle the help."""
        self.helping, self.scrolled = not self.helping, 0

    def back(self) -> None:
        """Close what is open, or else clear the filter."""
        if self.helping or self.opened:
            self.helping, self.opened, self.scrolled = False, "", 0
        else:
            self.needle = ""
