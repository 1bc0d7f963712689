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

from cachefs.publishing.fitting import Fitting
from cachefs.publishing.rule import Column, Field, Rule, Template

# Number of samples that a rule has to be right for before it is adopted. A choice between two files by chance is right
# for six samples in one of 64 cases, and is retracted soon after.
ENOUGH: Final = 6
# Maximum number of observations kept: a rule has to be right for nearly all of them.
MOST_OBSERVED: Final = 256
# Number of rules that are adopted or rejected before the search ends for good.
MOST_RULES: Final = 6
# A rule is wrong where it was wrong for more samples than FEW_WRONG, and for more than the part PART_WRONG of them: a
# dataset may replace a damaged file.
FEW_WRONG: Final = 2
PART_WRONG: Final = 0.05
# Maximum number of searches of all rows of all columns.
MOST_SEARCHES: Final = 3
# Number of observations tested for whether an entry occurs in their paths.
ASKED: Final = 6
# Files of one observation from which templates are made, and pairs of a file and a sample.
MOST_FILES: Final = 8
MOST_SEEDS: Final = 600
# Maximum number of templates tried at a time: 0.3 s where none fits, as for names that are hashes.
MOST_TEMPLATES: Final = 4000
# Number of observations needed where files may be missing in them.
ENOUGH_BATCHES: Final = 3
# Number of samples of a batch tested for whether an entry occurs in its paths.
MOST_SAMPLES: Final = 16


@dataclass(frozen=True)
class Observed:
    """Files that were opened while these samples were loaded."""

    samples: tuple[int, ...]
    # Absolute, in any order.
    paths: tuple[str, ...]
    # False where opened files of the samples may be missing from the paths, as the mount only sees cold reads.
    is_complete: bool = True
    # True where the paths are in the order of the samples, with equally many for each sample.
    in_order: bool = True


@dataclass(slots=True)
class Tally:
    """Counts the samples for which something was right or wrong."""

    right: int = 0
    wrong: int = 0

    def count(self, samples: int, wrong: int) -> None:
        """Count *samples*, of which *wrong* were wrong."""
        self.wrong += wrong
        self.right += samples - wrong

    @property
    def is_too_wrong(self) -> bool:
        return self.wrong > FEW_WRONG and self.wrong > PART_WRONG * (self.right + self.wrong)


@dataclass(frozen=True)
class _Kept:
    """An observation as the inference keeps it."""

    samples: tuple[int, ...]
    paths: frozenset[str]
    first: tuple[str, ...]  # of the paths
    together: str  # the paths, a line each
    is_complete: bool

    @property
    def weight(self) -> int:
        """The number of samples that the observation tells about."""
        return len(self.samples) if self.is_complete else min(len(self.samples), len(self.paths))


class Inference:
    """Searches and checks the rule of one dataset."""

    def __init__(self, columns: Sequence[Column], length: int) -> None:
        """columns: of the dataset; length: its number of samples."""
        self.columns: Final = {column.name: column for column in columns}
        self.length = length
        self._fitting = Fitting(self.columns, length)
        self._observed: deque[_Kept] = deque(maxlen=MOST_OBSERVED)
        self._rule: Rule | None = None
        self._former: list[Rule] = []  # rules that were wrong
        self._tally = Tally()  # since the present rule was adopted
        self._seen = 0  # samples
        self._left = 0  # templates that may still be tried
        self._searches = 0
        self._tried = 0  # value of `_seen` at the last search without a result

    @property
    def rule(self) -> Rule | None:
        """The rule that is right so far; None where there is none."""
        return self._rule

    @property
    def is_wrong(self) -> bool:
        """Whether the search has ended for good, without a rule."""
        return self._rule is None and len(self._former) >= MOST_RULES

    def grow(self, length: int) -> None:
        """Set the number of samples, which is larger than was known."""
        self.length = length
        self._fitting = Fitting(self.columns, length)

    def observe(self, observed: Observed) -> None:
        """Record an observation. Search for a rule, or compare the adopted one, and retract it where it is wrong."""
        if self.is_wrong or not observed.samples or not observed.paths:
            return
        if not all(0 <= sample < self.length for sample in observed.samples):
            return
        paths = observed.paths
        kept = _Kept(observed.samples, frozenset(paths), paths[:MOST_FILES], "\n".join(paths), observed.is_complete)
        self._observed.append(kept)
        self._seen += kept.weight
        if self._rule is not None:
            self._compare(self._rule, kept)
        elif self._seen >= max(ENOUGH, 2 * self._tried) and (
            observed.is_complete or len(self._observed) >= ENOUGH_BATCHES
        ):
            self._look()

    def reject(self) -> None:
        """Reject the adopted rule, whose files do not exist, and search for another."""
        if self._rule is not None:
            self._former.append(self._rule)
            self._rule = None
            self._look()

    def _compare(self, rule: Rule, observed: _Kept) -> None:
        wrong = self._misses(rule, observed)
        self._tally.count(observed.weight, wrong)
        if wrong and self._tally.wrong <= FEW_WRONG + 1:
            # Classes may come one after the other, so a rule for the first class has to become one for all.
            better = self._found()
            if better not in (None, rule) and not self._misses(better, observed):
                self._former.append(rule)
                self._adopt(better)
                return
        if self._tally.is_too_wrong:
            self._former.append(rule)
            self._rule = None
            self._tried = self._seen

    def _look(self) -> None:
        found = None if self.is_wrong else self._found()
        if not self.is_wrong and not self._says_all(found) and self._searches < MOST_SEARCHES:
            self._searches += 1
            found = self._found(search=True) or found
        if found is None:
            self._tried = self._seen
        else:
            self._adopt(found)

    def _says_all(self, rule: Rule | None) -> bool:
        """Return whether the rule names all files of the latest observation."""
        last = self._observed[-1]
        return rule is not None and last.paths.issubset(
            path for sample in last.samples for path in rule.of(sample, self.columns)
        )

    def _adopt(self, rule: Rule) -> None:
        self._rule = rule
        self._tally = Tally()

    # --- looking for a rule ---------------------------------------------------------------------------------------

    def _found(self, *, search: bool = False) -> Rule | None:
        """Return a rule that is right for the observations, and was not rejected before. search: see `templates`."""
        chosen: list[Template] = []
        self._left = MOST_TEMPLATES
        for sample, path in islice(self._seeds(chosen), MOST_SEEDS):
            if (best := self._best(path, sample, search=search)) is not None:
                chosen.append(best)
        rule = Rule(tuple(chosen))
        if not chosen or rule in self._former:
            return None
        samples = sum(observed.weight for observed in self._observed)
        return (
            rule if sum(self._misses(rule, observed) for observed in self._observed) <= PART_WRONG * samples else None
        )

    def _seeds(self, chosen: list[Template]) -> Iterator[tuple[int, str]]:
        """Yield samples of the first and the latest observation, with paths that no chosen template gives."""
        for observed in (self._observed[-1], self._observed[0]):
            for path in observed.first:
                for sample in observed.samples:
                    if any(path == template.of(one, self.columns) for template in chosen for one in observed.samples):
                        break
                    yield sample, path

    def _best(self, path: str, sample: int, *, search: bool) -> Template | None:
        """Return the template that is right for the observations, and whose entries cover most of the path."""
        best, most = None, 0
        for template in self._fitting.templates(path, sample, self._is_likely, search=search):
            self._left -= 1
            if self._left < 0:
                break
            said = len(path) - sum(map(len, template.texts))
            if said > most and self._fits(template):
                best, most = template, said
        return best

    def _is_likely(self, field: Field) -> bool:
        """Return whether the field's entry occurs in the paths of all but one of the latest observations."""
        asked = list(self._observed)[-ASKED:]
        return sum(map(self._has, asked, [field] * len(asked))) >= len(asked) - 1

    def _has(self, observed: _Kept, field: Field) -> bool:
        # In a complete observation each sample has the entry, so one sample is enough.
        for sample in observed.samples[: 1 if observed.is_complete else MOST_SAMPLES]:
            text = field.of(sample, self.columns)
            if text is not None and text in observed.together:
                return True
        return False

    def _fits(self, template: Template) -> bool:
        """Return whether the template is right for nearly all observations, and gives different files."""
        samples: set[int] = set()
        files: set[str] = set()
        asked = wrong = 0
        seen = missed = 0  # incomplete observations with one of the template's files, and without
        for observed in reversed(self._observed):
            found = 0
            for sample in observed.samples:
                path = template.of(sample, self.columns)
                asked += 1
                if path is not None and path in observed.paths:
                    samples.add(sample)
                    files.add(path)
                    found += 1
                elif observed.is_complete:
                    wrong += 1
                    if wrong > 1 + PART_WRONG * asked:
                        return False
            if not observed.is_complete:
                seen, missed = (seen + 1, missed) if found else (seen, missed + 1)
                if missed > seen + 1:
                    return False
        return len(samples) >= min(ENOUGH, self.length) and len(files) > 1

    def _misses(self, rule: Rule, observed: _Kept) -> int:
        """Return for how many of the samples the rule is wrong."""
        said = [rule.of(sample, self.columns) for sample in observed.samples]
        if observed.is_complete:
            return sum(not paths or not observed.paths.issuperset(paths) for paths in said)
        return min(observed.weight, len(observed.paths.difference(*said)))
