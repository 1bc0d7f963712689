"""From the first few samples, and the files that were opened for them, to a rule that says the files of all samples.

Nothing here reads a file, or an object of the job. A rule is looked for by writing a path of one sample as text and
entries of the dataset's columns, in all ways that there are, and asking which of these is right for the other samples.
It goes on being compared with what is opened, and is retracted where it is wrong.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cachefs.publishing.fitting import Fitting
from cachefs.publishing.rule import Column, Field, Rule, Template

# Samples that a rule has to be right for before it is adopted. A choice between two files by chance is right for six
# samples in one of 64 cases, and is retracted soon after.
ENOUGH: Final = 6
# Observations that are kept: a rule has to be right for all of them but a few.
MOST_OBSERVED: Final = 256
# Rules that are adopted, or rejected, one after the other, until it is given up.
MOST_RULES: Final = 6
# A rule is wrong where it was so for more samples than this, and for more than this part of them: a dataset may take
# another file where one is damaged.
FEW_WRONG: Final = 2
PART_WRONG: Final = 0.05
# Times that all rows of all columns are searched.
MOST_SEARCHES: Final = 3
# Observations that are asked whether an entry may stand in paths.
ASKED: Final = 6
# Files of one observation from which templates are made, and pairs of a file and a sample.
MOST_FILES: Final = 8
MOST_SEEDS: Final = 600
# Templates that are tried at a time: 0.3 s where all of them are of no use, as in names that are made by a hash.
MOST_TEMPLATES: Final = 4000
# Observations that are needed where files may be missing in them.
ENOUGH_BATCHES: Final = 3
# Samples of a batch that are asked whether an entry may stand in its paths.
MOST_SAMPLES: Final = 16


@dataclass(frozen=True)
class Observed:
    """Files that were opened while these samples were loaded."""

    samples: tuple[int, ...]
    # Absolute, in any order.
    paths: tuple[str, ...]
    # False where files of the samples may have been opened that are not among the paths, as the mount only sees cold
    # reads.
    is_complete: bool = True
    # False where nobody knows that the paths are in the order of the samples, and equally many of each.
    in_order: bool = True


@dataclass(slots=True)
class Tally:
    """For how many samples something was right, and wrong."""

    right: int = 0
    wrong: int = 0

    def count(self, samples: int, wrong: int) -> None:
        """*wrong* of so many samples."""
        self.wrong += wrong
        self.right += samples - wrong

    @property
    def is_too_wrong(self) -> bool:
        return self.wrong > FEW_WRONG and self.wrong > PART_WRONG * (self.right + self.wrong)


@dataclass(frozen=True)
class _Kept:
    """An observation that is kept."""

    samples: tuple[int, ...]
    paths: frozenset[str]
    first: tuple[str, ...]  # of the paths
    together: str  # the paths, a line each
    is_complete: bool

    @property
    def weight(self) -> int:
        """How many samples it says something of."""
        return len(self.samples) if self.is_complete else min(len(self.samples), len(self.paths))


class Inference:
    """What is known of one dataset's rule."""

    def __init__(self, columns: Sequence[Column], length: int) -> None:
        """columns: what the dataset lists; length: its number of samples."""
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
        self._tried = 0  # samples that had been seen when a rule was last looked for in vain

    @property
    def rule(self) -> Rule | None:
        """The rule that is right so far; None where there is none."""
        return self._rule

    @property
    def is_wrong(self) -> bool:
        """Is it given up? No rule will be adopted any more."""
        return self._rule is None and len(self._former) >= MOST_RULES

    def grow(self, length: int) -> None:
        """There are more samples than was known: *length* of them."""
        self.length = length
        self._fitting = Fitting(self.columns, length)

    def observe(self, observed: Observed) -> None:
        """Take it into account: look for a rule, or compare the one that there is, and retract it where it is wrong."""
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
        """Something else says that the rule is wrong: its files are not there."""
        if self._rule is not None:
            self._former.append(self._rule)
            self._rule = None
            self._look()

    def _compare(self, rule: Rule, observed: _Kept) -> None:
        wrong = self._misses(rule, observed)
        self._tally.count(observed.weight, wrong)
        if wrong and self._tally.wrong <= FEW_WRONG + 1:
            # As classes come one after the other, a rule for the first one has to become one for all.
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
        """Does it say all files that were opened last?"""
        last = self._observed[-1]
        return rule is not None and last.paths.issubset(
            path for sample in last.samples for path in rule.of(sample, self.columns)
        )

    def _adopt(self, rule: Rule) -> None:
        self._rule = rule
        self._tally = Tally()

    # --- looking for a rule ---------------------------------------------------------------------------------------

    def _found(self, *, search: bool = False) -> Rule | None:
        """A rule that is right for what was observed, and was not wrong before. search: see `templates`."""
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
        """Samples with a path that none of the templates says, out of the first observation and the last one."""
        for observed in (self._observed[-1], self._observed[0]):
            for path in observed.first:
                for sample in observed.samples:
                    if any(path == template.of(one, self.columns) for template in chosen for one in observed.samples):
                        break
                    yield sample, path

    def _best(self, path: str, sample: int, *, search: bool) -> Template | None:
        """The template that is right for what was observed, and whose entries say most of the path."""
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
        """Does its entry stand in a path of most of the others that were observed last?"""
        asked = list(self._observed)[-ASKED:]
        return sum(map(self._has, asked, [field] * len(asked))) >= len(asked) - 1

    def _has(self, observed: _Kept, field: Field) -> bool:
        # Where all was seen, each of the samples has to have it.
        for sample in observed.samples[: 1 if observed.is_complete else MOST_SAMPLES]:
            text = field.of(sample, self.columns)
            if text is not None and text in observed.together:
                return True
        return False

    def _fits(self, template: Template) -> bool:
        """Is it right for all that was observed but a few, and for different files?"""
        samples: set[int] = set()
        files: set[str] = set()
        asked = wrong = 0
        seen = missed = 0  # observations in which files may be missing, with one of the template's files and without
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
        """For how many of the samples is it wrong?"""
        said = [rule.of(sample, self.columns) for sample in observed.samples]
        if observed.is_complete:
            return sum(not paths or not observed.paths.issuperset(paths) for paths in said)
        return min(observed.weight, len(observed.paths.difference(*said)))
