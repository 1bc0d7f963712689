"""Infers a rule for the files of all samples from the files that were opened for the first few samples.

Nothing here reads a file, or an object of the job. The search writes a path of one sample as text and entries of the
dataset's columns, in all possible ways, and keeps the one that is right for the other samples. An adopted rule is
compared with further opened files, and retracted where it is wrong.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cachefs.publishing.files.rule import DatasetColumn, FileRule, PathField, PathTemplate
from cachefs.publishing.files.templates import TemplateFinder

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
            said = len(path) - sum(map(len, template.texts))
            if said > most and self._is_right(template):
                best, most = template, said
        return best

    def _is_likely(self, field: PathField) -> bool:
        """Return whether the field's entry occurs in the paths of all but one of the latest observations."""
        asked = list(self._observed)[-PROBED_OBSERVATIONS:]
        return sum(map(self._is_field_in_paths, asked, [field] * len(asked))) >= len(asked) - 1

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
        asked = wrong = 0
        seen = missed = 0  # incomplete observations with one of the template's files, and without
        for observed in reversed(self._observed):
            found = 0
            for sample in observed.samples:
                path = template.path_of(sample, self.columns)
                asked += 1
                if path is not None and path in observed.paths:
                    samples.add(sample)
                    files.add(path)
                    found += 1
                elif observed.is_complete:
                    wrong += 1
                    if wrong > 1 + MAX_WRONG_PART * asked:
                        return False
            if not observed.is_complete:
                seen, missed = (seen + 1, missed) if found else (seen, missed + 1)
                if missed > seen + 1:
                    return False
        return len(samples) >= min(MIN_SAMPLES, self.length) and len(files) > 1

    def _count_wrong(self, rule: FileRule, observed: _Observation) -> int:
        """Return for how many of the samples the rule is wrong."""
        said = [rule.paths_of(sample, self.columns) for sample in observed.samples]
        if observed.is_complete:
            return sum(not paths or not observed.paths.issuperset(paths) for paths in said)
        return min(observed.weight, len(observed.paths.difference(*said)))
