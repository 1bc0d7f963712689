"""Texts for users about a loader that is not understood: what is missing, and what would help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.counts import counted

# Number of observed samples before their files count as not understood: a rule is found or rejected long before.
MANY: Final = 256
# Minimum number of different opened files: samples of fewer files are parts of files.
MANY_FILES: Final = MANY // 4
# Appended to a note.
THE_JOB_GOES_ON: Final = "the job goes on"
# Maximum length of a name in characters.
MOST_NAME: Final = 80


class Unknown(StrEnum):
    """The unknown property of a loader."""

    # The files of its samples.
    FILES = "files"
    # The parts of a few files that its samples are.
    PARTS = "parts"
    # The order in which it draws samples.
    ORDER = "order"
    # What it draws, as these are not numbers.
    NUMBERS = "numbers"
    # Its reads, as it is a loader of an IterableDataset.
    STREAM = "stream"


_WORDS: Final = {
    Unknown.FILES: (
        "its files are being learned, and read ahead from epoch 2 on; nothing that the dataset lists says which file a "
        'sample is, so for epoch 1 publish its files in the code (docs/publishing.md, "In the code")'
    ),
    Unknown.PARTS: (
        "not understood: its samples are parts of a few files, which are brought whole where they fit on the "
        "node, and not in the order of the samples; publish its records in the code, if they are npy, tar, TFRecord or "
        'all of one size (docs/publishing.md, "Records in large files")'
    ),
    Unknown.ORDER: (
        "not understood: the order that {sampler} gives is known only as it is drawn; if iterating it once more "
        'changes nothing, mark it with cachefs.pure_sampler (docs/publishing.md, "Samplers that are pure")'
    ),
    Unknown.NUMBERS: (
        "not understood: what {sampler} draws is no numbers of samples, so nothing is read ahead; publish its "
        'files in the code (docs/publishing.md, "In the code")'
    ),
    Unknown.STREAM: (
        "not understood: an IterableDataset alone knows what it reads; publish its shards with cachefs.publish "
        '(docs/publishing.md, "Shards and streams")'
    ),
}


def words(unknown: Unknown, dataset: str, sampler: str, place: str = "") -> str:
    """Return one line about *unknown*. dataset, sampler: class names; place: the line that made the loader."""
    return f"loader {loader_name(dataset, place)}: {_WORDS[unknown].format(sampler=_name(sampler, 'its sampler'))}"


def loader_name(dataset: str, place: str = "") -> str:
    """Return the name of a loader: the class of its dataset, and the line that made it, where that is known."""
    where = f" ({_name(place, 'somewhere')})" if place else ""
    return f"{_name(dataset, 'of a dataset')}{where}"


def known_words(name: str, samples: int, epoch: int, *, by_rule: bool) -> str:
    """Return one line about a loader whose order is known. name: of the loader; samples: per epoch; epoch: the first
    that is read ahead, counted from 1."""
    how = " (which file each sample reads was inferred from its first reads)" if by_rule else ""
    return f"loader {name}: {counted(samples, 'sample')} an epoch, read ahead from epoch {epoch} on{how}"


def shards_words(name: str, shards: int, epoch: int) -> str:
    """Return the line of `known_words` for a stream of shards."""
    return f"loader {name}: {counted(shards, 'shard')} an epoch, read ahead from epoch {epoch} on"


def unsettled_words(name: str) -> str:
    """Return one line about a loader that ended before it was understood."""
    return f"loader {name}: it ended before it was understood"


def learned_words(name: str, epoch: int) -> str:
    """Return one line about a loader whose files were learned without an earlier line that announced it. epoch: the
    first that is read ahead, counted from 1."""
    return f"loader {name}: its files were learned, and it is read ahead from epoch {epoch} on"


def _name(given: str, otherwise: str) -> str:
    return given[:MOST_NAME] if given.isprintable() and given else otherwise


@dataclass(slots=True)
class Unexplained:
    """Counts observed samples and files for which no rule is known."""

    # A set, since a long batch is reported in parts, each with all of its samples.
    _samples: set[int] = field(default_factory=set)
    _files: set[str] = field(default_factory=set)

    def observe(self, samples: Sequence[int], paths: tuple[str, ...]) -> None:
        """Record that these paths were opened for these samples."""
        if len(self._samples) < MANY:
            self._samples.update(samples)
        for path in paths:
            if len(self._files) < MANY_FILES:
                self._files.add(path)

    @property
    def unknown(self) -> Unknown | None:
        """The unknown property of the loader; None while too few samples were observed."""
        if len(self._samples) < MANY or not self._files:
            return None
        return Unknown.FILES if len(self._files) >= MANY_FILES else Unknown.PARTS
