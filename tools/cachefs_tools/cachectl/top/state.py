"""The user's choices in the picture: list, row, order, and opened item."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs_tools.cachectl.top.layout import first_visible
from cachefs_tools.cachectl.top.lists import ListKind, ListRow

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
