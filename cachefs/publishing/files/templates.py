"""Finds the ways in which the path of one sample can be composed of text and entries of columns."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final

import numpy

from cachefs.publishing.files.rule import (
    SAMPLE_NUMBER,
    TEXT_FORMS,
    DatasetColumn,
    JoinedTexts,
    PathField,
    PathTemplate,
    RowSelector,
    TextForm,
    number_in,
)

# Maximum number of places in a path for templates of one, two and three fields; the longest entries first.
_MAX_RANGES: Final = (96, 40, 16)
# A shorter entry counts only where no letter or digit stands beside it: "1" stands in every other path.
_MIN_LENGTH: Final = 4
# Maximum number of rows of a column in which a text is found.
_MAX_ROWS: Final = 4
_NUMBERS: Final = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class _EntryRange:
    """A range of characters in a path that equals an entry."""

    begin: int
    end: int
    field: PathField


class TemplateFinder:
    """The columns of one dataset, and the rows of them that its samples may use."""

    def __init__(self, columns: Mapping[str, DatasetColumn], length: int) -> None:
        """columns: by name; length: number of samples."""
        self._columns = columns
        indices = {
            column.name: int(column.values.max())
            for column in columns.values()
            if isinstance(column.values, numpy.ndarray) and len(column) >= length > 0 and column.values.min() >= 0
        }
        self._rows = {
            column.name: _row_selectors(len(column), indices, length) for column in columns.values() if len(column)
        }

    def find_templates(
        self, path: str, sample: int, is_likely: Callable[[PathField], bool], *, search: bool = False
    ) -> Iterator[PathTemplate]:
        """Yield templates that give *path* for the sample: first those with one field, and those whose fields cover
        more of it.

        is_likely: whether the paths of other samples may contain their entries of a field; search: look for the path's
        name in all rows, not only the sample's own. A search takes 20 ms for a column of a million rows.
        """
        likely: dict[PathField, bool] = {}
        places = []
        for place in self._entry_ranges(path, sample, search=search):
            if place.field not in likely:
                likely[place.field] = is_likely(place.field)
            if likely[place.field]:
                places.append(place)
        places.sort(key=lambda place: place.begin - place.end)
        for fields, most in enumerate(_MAX_RANGES, 1):
            for chosen in combinations(places[:most], fields):
                ordered = sorted(chosen, key=lambda place: place.begin)
                if all(left.end <= right.begin for left, right in pairwise(ordered)):
                    yield _make_template(path, ordered)

    def _entry_ranges(self, path: str, sample: int, *, search: bool) -> Iterator[_EntryRange]:
        numbers = [(found.start(), found.end()) for found in _NUMBERS.finditer(path)]
        for begin, end in numbers:
            for width in _widths(path[begin:end]):
                yield _EntryRange(begin, end, _sample_number(path[begin:end], sample, width))
        for name, rows in self._rows.items():
            column = self._columns[name]
            for row in (*rows, *(_search_rows(column, path, sample) if search else ())):
                at = row.row_of(sample, self._columns, len(column))
                if at is not None:
                    yield from _ranges_of_entry(path, numbers, column, row, at)


def _make_template(path: str, ranges: list[_EntryRange]) -> PathTemplate:
    begins = [0, *(place.end for place in ranges)]
    ends = [*(place.begin for place in ranges), len(path)]
    texts = tuple(path[begin:end] for begin, end in zip(begins, ends, strict=True))
    return PathTemplate(texts, tuple(place.field for place in ranges))


def _sample_number(digits: str, sample: int, width: int) -> PathField:
    return PathField(SAMPLE_NUMBER, RowSelector(), TextForm(width=width, offset=int(digits) - sample))


def _widths(digits: str) -> list[int]:
    """Return the widths that a number may be formatted with to give these digits; the next sample decides."""
    if digits[0] == "0" and len(digits) > 1:
        return [len(digits)]
    return [0, *range(len(digits), 1, -1)]


def _ranges_of_entry(
    path: str, numbers: list[tuple[int, int]], column: DatasetColumn, row: RowSelector, at: int
) -> Iterator[_EntryRange]:
    value = column.values[at]
    number = number_in(value)
    for begin, end in numbers if number is not None and number >= 0 else ():
        if int(path[begin:end]) == number:
            for width in _widths(path[begin:end]):
                yield _EntryRange(begin, end, PathField(column.name, row, TextForm(width=width)))
    if not isinstance(value, str):
        return
    known: set[str] = set()
    for form in TEXT_FORMS:
        text = form.select_text(value)
        if text and text not in known:
            known.add(text)
            for begin in _occurrences(text, path):
                yield _EntryRange(begin, begin + len(text), PathField(column.name, row, form))


def _occurrences(text: str, path: str) -> Iterator[int]:
    begin = path.find(text)
    while begin >= 0:
        end = begin + len(text)
        stands_alone = not (path[begin - 1 : begin].isalnum() and text[0].isalnum()) and not (
            path[end : end + 1].isalnum() and text[-1].isalnum()
        )
        if stands_alone or len(text) >= _MIN_LENGTH:
            yield begin
        begin = path.find(text, begin + 1)


def _row_selectors(rows: int, indices: Mapping[str, int], length: int) -> list[RowSelector]:
    """Return the rows, of *rows*, that a sample may use. indices: the largest entry of columns of numbers."""
    found = [RowSelector()]
    if length > rows and length % rows == 0:
        found.append(RowSelector(divisor=length // rows))
    # A column of indices into a list uses most of it; labels are no indices into a list of files.
    return [
        *found,
        *(RowSelector(index_column=name) for name, largest in indices.items() if rows // 2 <= largest < rows),
    ]


def _search_rows(column: DatasetColumn, path: str, sample: int) -> Iterator[RowSelector]:
    """Yield the rows of the column that contain the path's name, as functions of the sample number."""
    name = path.rpartition("/")[2].partition(".")[0]
    if isinstance(column.values, JoinedTexts) and len(name) >= _MIN_LENGTH:
        for at in column.values.rows_with(name, _MAX_ROWS):
            for times in (1, -1, 2):
                plus = (at - times * sample) % len(column)
                if plus or times != 1:
                    yield RowSelector(factor=times, offset=plus)
