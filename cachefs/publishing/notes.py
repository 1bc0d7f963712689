"""What a user is told of a loader that is not understood: what it is, and what would help."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

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
        "a loader of {dataset}: nothing that the dataset lists says which file a sample is, so its first epoch is not "
        'read ahead; publish its files in the code (docs/publishing.md, "In the code")'
    ),
    Unknown.PARTS: (
        "a loader of {dataset}: its samples are parts of a few files, which are brought whole where they fit on the "
        "node, and not in the order of the samples; publish its records in the code, if they are npy, tar, TFRecord or "
        'all of one size (docs/publishing.md, "Records in large files")'
    ),
    Unknown.ORDER: (
        "a loader of {dataset}: the order that {sampler} gives is known only as it is drawn; if iterating it once more "
        'changes nothing, mark it with cachefs.pure_sampler (docs/publishing.md, "Samplers that are pure")'
    ),
    Unknown.NUMBERS: (
        "a loader of {dataset}: what {sampler} draws is no numbers of samples, so nothing is read ahead; publish its "
        'files in the code (docs/publishing.md, "In the code")'
    ),
    Unknown.STREAM: (
        "{dataset} is an IterableDataset, which alone knows what it reads; publish its shards with cachefs.publish "
        '(docs/publishing.md, "Shards and streams")'
    ),
}


def words(unknown: Unknown, dataset: str, sampler: str) -> str:
    """One line. dataset, sampler: names of their classes."""
    return _WORDS[unknown].format(dataset=_name(dataset, "a dataset"), sampler=_name(sampler, "its sampler"))


def _name(given: str, otherwise: str) -> str:
    return given[:MOST_NAME] if given.isprintable() and given else otherwise


@dataclass(slots=True)
class Unexplained:
    """Samples of which it was seen what was opened for them, while nobody knows a rule."""

    _samples: int = 0
    _files: set[str] = field(default_factory=set)

    def observe(self, samples: int, paths: tuple[str, ...]) -> None:
        """These paths were opened for so many samples."""
        self._samples += samples
        for path in paths:
            if len(self._files) < MANY_FILES:
                self._files.add(path)

    @property
    def unknown(self) -> Unknown | None:
        """What is not known of them; None while they are too few to say so."""
        if self._samples < MANY or not self._files:
            return None
        return Unknown.FILES if len(self._files) >= MANY_FILES else Unknown.PARTS
