"""Splits a long list into pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

PAGE_ROWS: Final = 20

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RowPage(Generic[Item]):
    """Some rows of a list."""

    rows: list[Item]
    # This page's number, from 0; the number of pages, at least 1; the rows of all pages.
    page: int
    pages: int
    total: int


def page_of(items: Sequence[Item], number: int) -> RowPage[Item]:
    """Return the page with that number, or the last one."""
    pages = max(1, -(-len(items) // PAGE_ROWS))
    number = min(max(number, 0), pages - 1)
    return RowPage(list(items[number * PAGE_ROWS : (number + 1) * PAGE_ROWS]), number, pages, len(items))
