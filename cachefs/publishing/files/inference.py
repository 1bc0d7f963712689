"""Infers a rule for the files of all samples from the files that were opened for the first few samples.

Nothing here reads a file, or an object of the job. The search writes a path of one sample as text and entries of the
dataset's columns, in all possible ways, and keeps the one that is right for the other samples. An adopted rule is
compared with further opened files, and retracted where it is wrong.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from typing import Final

import numpy

from cachefs.publishing.files.rule import (
    SAMPLE_NUMBER,
    TEXT_FORMS,
    DatasetColumn,
    FileRule,
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
# Number of samples that a rule has to be right for before it is adopted. A choice between two files by chance is right
# for six samples in one of 64 cases, and is retracted soon after.
MIN_SAMPLES: Final = 6
# Maximum number of observations kept: a rule has to be right for nearly all of them.
MAX_OBSERVATIONS: Final = 256
# Number of rules that are adopted or rejected before the search ends for good.
MAX_RULES: Final = 6
# A rule is wrong where it was wrong for more samples than FEW_WRONG, and for more than the part MAX_WRONG_PART of them:
# a dataset may replace a damaged file.
FEW_WRONG: Final = 2
MAX_WRONG_PART: Final = 0.05
# Maximum number of searches of all rows of all columns.
MAX_SEARCHES: Final = 3
# Number of observations tested for whether an entry occurs in their paths.
PROBED_OBSERVATIONS: Final = 6
# Files of one observation from which templates are made, and pairs of a file and a sample.
MAX_FILES: Final = 8
MAX_SEEDS: Final = 600
# Maximum number of templates tried at a time: 0.3 s where none fits, as for names that are hashes.
MAX_TEMPLATES: Final = 4000
# Number of observations needed where files may be missing in them.
MIN_BATCHES: Final = 3
# Number of samples of a batch tested for whether an entry occurs in its paths.
MAX_BATCH_SAMPLES: Final = 16


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
        ranges = []
        for entry_range in self._entry_ranges(path, sample, search=search):
            if entry_range.field not in likely:
                likely[entry_range.field] = is_likely(entry_range.field)
            if likely[entry_range.field]:
                ranges.append(entry_range)
        ranges.sort(key=lambda entry_range: entry_range.begin - entry_range.end)
        for fields, most in enumerate(_MAX_RANGES, 1):
            for chosen in combinations(ranges[:most], fields):
                ordered = sorted(chosen, key=lambda entry_range: entry_range.begin)
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
    begins = [0, *(entry_range.end for entry_range in ranges)]
    ends = [*(entry_range.begin for entry_range in ranges), len(path)]
    texts = tuple(path[begin:end] for begin, end in zip(begins, ends, strict=True))
    return PathTemplate(texts, tuple(entry_range.field for entry_range in ranges))


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


@dataclass(frozen=True)
class OpenedFiles:
    """Files that were opened while these samples were loaded."""

    samples: tuple[int, ...]
    # Absolute, in any order.
    paths: tuple[str, ...]
    # False where opened files of the samples may be missing from the paths, as the mount only sees cold reads.
    is_complete: bool = True
    # True where the paths are in the order of the samples, with equally many for each sample.
    is_in_order: bool = True


@dataclass(slots=True)
class MatchCounts:
    """Counts the samples for which something was right or wrong."""

    right: int = 0
    wrong: int = 0

    def add_samples(self, samples: int, wrong: int) -> None:
        """Count *samples*, of which *wrong* were wrong."""
        self.wrong += wrong
        self.right += samples - wrong

    @property
    def is_too_wrong(self) -> bool:
        return self.wrong > FEW_WRONG and self.wrong > MAX_WRONG_PART * (self.right + self.wrong)


@dataclass(frozen=True)
class _Observation:
    """An observation as the inference keeps it."""

    samples: tuple[int, ...]
    paths: frozenset[str]
    first_paths: tuple[str, ...]  # of the paths
    joined_paths: str  # the paths, a line each
    is_complete: bool

    @property
    def weight(self) -> int:
        """The number of samples that the observation tells about."""
        return len(self.samples) if self.is_complete else min(len(self.samples), len(self.paths))


class RuleInference:
    """Searches and checks the rule of one dataset."""

    def __init__(self, columns: Sequence[DatasetColumn], length: int) -> None:
        """columns: of the dataset; length: its number of samples."""
        self.columns: Final = {column.name: column for column in columns}
        self.length = length
        self._template_finder = TemplateFinder(self.columns, length)
        self._observed: deque[_Observation] = deque(maxlen=MAX_OBSERVATIONS)
        self._rule: FileRule | None = None
        self._wrong_rules: list[FileRule] = []  # rules that were wrong
        self._counts = MatchCounts()  # since the present rule was adopted
        self._seen = 0  # samples
        self._templates_left = 0  # templates that may still be tried
        self._searches = 0
        self._seen_at_search = 0  # value of `_seen` at the last search without a result

    @property
    def rule(self) -> FileRule | None:
        """The rule that is right so far; None where there is none."""
        return self._rule

    @property
    def has_failed(self) -> bool:
        """Whether the search has ended for good, without a rule."""
        return self._rule is None and len(self._wrong_rules) >= MAX_RULES

    def set_length(self, length: int) -> None:
        """Set the number of samples, which is larger than was known."""
        self.length = length
        self._template_finder = TemplateFinder(self.columns, length)

    def add_opened(self, observed: OpenedFiles) -> None:
        """Record an observation. Search for a rule, or compare the adopted one, and retract it where it is wrong."""
        if self.has_failed or not observed.samples or not observed.paths:
            return
        if not all(0 <= sample < self.length for sample in observed.samples):
            return
        paths = observed.paths
        kept = _Observation(
            observed.samples, frozenset(paths), paths[:MAX_FILES], "\n".join(paths), observed.is_complete
        )
        self._observed.append(kept)
        self._seen += kept.weight
        if self._rule is not None:
            self._check_rule(self._rule, kept)
        elif self._seen >= max(MIN_SAMPLES, 2 * self._seen_at_search) and (
            observed.is_complete or len(self._observed) >= MIN_BATCHES
        ):
            self._search_rule()

    def reject_rule(self) -> None:
        """Reject the adopted rule, whose files do not exist, and search for another."""
        if self._rule is not None:
            self._wrong_rules.append(self._rule)
            self._rule = None
            self._search_rule()

    def _check_rule(self, rule: FileRule, observed: _Observation) -> None:
        wrong = self._count_wrong(rule, observed)
        self._counts.add_samples(observed.weight, wrong)
        if wrong and self._counts.wrong <= FEW_WRONG + 1:
            # Classes may come one after the other, so a rule for the first class has to become one for all.
            better = self._find_rule()
            if better not in (None, rule) and not self._count_wrong(better, observed):
                self._wrong_rules.append(rule)
                self._adopt_rule(better)
                return
        if self._counts.is_too_wrong:
            self._wrong_rules.append(rule)
            self._rule = None
            self._seen_at_search = self._seen

    def _search_rule(self) -> None:
        found = None if self.has_failed else self._find_rule()
        if not self.has_failed and not self._covers_latest(found) and self._searches < MAX_SEARCHES:
            self._searches += 1
            found = self._find_rule(search=True) or found
        if found is None:
            self._seen_at_search = self._seen
        else:
            self._adopt_rule(found)

    def _covers_latest(self, rule: FileRule | None) -> bool:
        """Return whether the rule names all files of the latest observation."""
        last = self._observed[-1]
        return rule is not None and last.paths.issubset(
            path for sample in last.samples for path in rule.paths_of(sample, self.columns)
        )

    def _adopt_rule(self, rule: FileRule) -> None:
        self._rule = rule
        self._counts = MatchCounts()

    # --- looking for a rule ---------------------------------------------------------------------------------------

    def _find_rule(self, *, search: bool = False) -> FileRule | None:
        """Return a rule that is right for the observations, and was not rejected before. search: see
        `find_templates`."""
        chosen: list[PathTemplate] = []
        self._templates_left = MAX_TEMPLATES
        for sample, path in islice(self._seeds(chosen), MAX_SEEDS):
            if (best := self._best_template(path, sample, search=search)) is not None:
                chosen.append(best)
        rule = FileRule(tuple(chosen))
        if not chosen or rule in self._wrong_rules:
            return None
        samples = sum(observed.weight for observed in self._observed)
        return (
            rule
            if sum(self._count_wrong(rule, observed) for observed in self._observed) <= MAX_WRONG_PART * samples
            else None
        )

    def _seeds(self, chosen: list[PathTemplate]) -> Iterator[tuple[int, str]]:
        """Yield samples of the first and the latest observation, with paths that no chosen template gives."""
        for observed in (self._observed[-1], self._observed[0]):
            for path in observed.first_paths:
                for sample in observed.samples:
                    if any(
                        path == template.path_of(one, self.columns) for template in chosen for one in observed.samples
                    ):
                        break
                    yield sample, path

    def _best_template(self, path: str, sample: int, *, search: bool) -> PathTemplate | None:
        """Return the template that is right for the observations, and whose entries cover most of the path."""
        best, most = None, 0
        for template in self._template_finder.find_templates(path, sample, self._is_likely, search=search):
            self._templates_left -= 1
            if self._templates_left < 0:
                break
            covered = len(path) - sum(map(len, template.texts))
            if covered > most and self._is_right(template):
                best, most = template, covered
        return best

    def _is_likely(self, field: PathField) -> bool:
        """Return whether the field's entry occurs in the paths of all but one of the latest observations."""
        probed = list(self._observed)[-PROBED_OBSERVATIONS:]
        return sum(map(self._is_field_in_paths, probed, [field] * len(probed))) >= len(probed) - 1

    def _is_field_in_paths(self, observed: _Observation, field: PathField) -> bool:
        # In a complete observation each sample has the entry, so one sample is enough.
        for sample in observed.samples[: 1 if observed.is_complete else MAX_BATCH_SAMPLES]:
            text = field.text_of(sample, self.columns)
            if text is not None and text in observed.joined_paths:
                return True
        return False

    def _is_right(self, template: PathTemplate) -> bool:
        """Return whether the template is right for nearly all observations, and gives different files."""
        samples: set[int] = set()
        files: set[str] = set()
        checked = wrong = 0
        seen = missed = 0  # incomplete observations with one of the template's files, and without
        for observed in reversed(self._observed):
            found = 0
            for sample in observed.samples:
                path = template.path_of(sample, self.columns)
                checked += 1
                if path is not None and path in observed.paths:
                    samples.add(sample)
                    files.add(path)
                    found += 1
                elif observed.is_complete:
                    wrong += 1
                    if wrong > 1 + MAX_WRONG_PART * checked:
                        return False
            if not observed.is_complete:
                seen, missed = (seen + 1, missed) if found else (seen, missed + 1)
                if missed > seen + 1:
                    return False
        return len(samples) >= min(MIN_SAMPLES, self.length) and len(files) > 1

    def _count_wrong(self, rule: FileRule, observed: _Observation) -> int:
        """Return for how many of the samples the rule is wrong."""
        paths_of_samples = [rule.paths_of(sample, self.columns) for sample in observed.samples]
        if observed.is_complete:
            return sum(not paths or not observed.paths.issuperset(paths) for paths in paths_of_samples)
        return min(observed.weight, len(observed.paths.difference(*paths_of_samples)))
