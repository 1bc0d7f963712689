"""What a user is told of a loader that is not understood: what it is, and what would help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.counts import counted

# Samples of which it was seen what was opened for them, before their files count as not understood: a rule is found, or
# given up, long before.
MANY: Final = 256
# So many different files have to be among what was opened: samples of fewer are parts of files.
MANY_FILES: Final = MANY // 4
# What is said after a note.
THE_JOB_GOES_ON: Final = "the job goes on"
# Characters of a name.
MOST_NAME: Final = 80


class Unknown(StrEnum):
    """What is not known of a loader."""

    # Which files its samples are.
    FILES = "files"
    # Which parts of a few files its samples are.
    PARTS = "parts"
    # In which order it draws them.
    ORDER = "order"
    # What it draws, which is no numbers.
    NUMBERS = "numbers"
    # What it reads, as it is a loader of an IterableDataset.
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
    """One line. dataset, sampler: names of their classes; place: the line that has made the loader."""
    return f"loader {loader_name(dataset, place)}: {_WORDS[unknown].format(sampler=_name(sampler, 'its sampler'))}"


def loader_name(dataset: str, place: str = "") -> str:
    """What a loader is called: the class of its dataset, and the line that has made it, where that is known."""
    where = f" ({_name(place, 'somewhere')})" if place else ""
    return f"{_name(dataset, 'of a dataset')}{where}"


def known_words(name: str, samples: int, epoch: int, *, by_rule: bool) -> str:
    """One line of a loader whose order is known. name: of the loader; samples: of an epoch; epoch: from which on it is
    read ahead, counted from 1."""
    how = " (which file each sample reads was inferred from its first reads)" if by_rule else ""
    return f"loader {name}: {counted(samples, 'sample')} an epoch, read ahead from epoch {epoch} on{how}"


def shards_words(name: str, shards: int, epoch: int) -> str:
    """The same of a stream of so many shards."""
    return f"loader {name}: {counted(shards, 'shard')} an epoch, read ahead from epoch {epoch} on"


def unsettled_words(name: str) -> str:
    """One line of a loader that has ended before it was understood."""
    return f"loader {name}: it ended before it was understood"


def learned_words(name: str, epoch: int) -> str:
    """One line of a loader whose files were learned before anybody had said that they are being learned. epoch: from
    which on it is read ahead, counted from 1."""
    return f"loader {name}: its files were learned, and it is read ahead from epoch {epoch} on"


def _name(given: str, otherwise: str) -> str:
    return given[:MOST_NAME] if given.isprintable() and given else otherwise


@dataclass(slots=True)
class Unexplained:
    """Samples of which it was seen what was opened for them, while nobody knows a rule."""

    # A batch that takes long is told in parts, each with all of its samples.
    _samples: set[int] = field(default_factory=set)
    _files: set[str] = field(default_factory=set)

    def observe(self, samples: Sequence[int], paths: tuple[str, ...]) -> None:
        """These paths were opened for these samples."""
        if len(self._samples) < MANY:
            self._samples.update(samples)
        for path in paths:
            if len(self._files) < MANY_FILES:
                self._files.add(path)

    @property
    def unknown(self) -> Unknown | None:
        """What is not known of them; None while they are too few to say so."""
        if len(self._samples) < MANY or not self._files:
            return None
        return Unknown.FILES if len(self._files) >= MANY_FILES else Unknown.PARTS
