"""Texts for users about a loader that is not understood: what is missing, and what would help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.formatting import format_count

# Number of observed samples before their files count as not understood: a rule is found or rejected long before.
MIN_SAMPLES: Final = 256
# Minimum number of different opened files: samples of fewer files are parts of files.
MIN_FILES: Final = MIN_SAMPLES // 4
# Appended to a note.
THE_JOB_GOES_ON: Final = "the job continues"
# Maximum length of a name in characters.
MAX_NAME: Final = 80


class UnknownProperty(StrEnum):
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


_TEXTS: Final = {
    UnknownProperty.FILES: (
        "its files are being learned, and read ahead from epoch 2 on; the dataset lists nothing that tells the file "
        'of a sample; to have epoch 1 read ahead too, publish the files in the code (docs/publishing.md, "In the code")'
    ),
    UnknownProperty.PARTS: (
        "not understood: its samples are parts of a few files, which are fetched whole if they fit on the "
        "node, and not in the order of the samples; publish its records in the code, if they are npy, tar, TFRecord or "
        'all of one size (docs/publishing.md, "Records in large files")'
    ),
    UnknownProperty.ORDER: (
        "not understood: the order of {sampler} becomes known only while the loader draws it; if iterating it once "
        'more changes nothing, mark it with cachefs.pure_sampler (docs/publishing.md, "Samplers that are pure")'
    ),
    UnknownProperty.NUMBERS: (
        "not understood: {sampler} does not yield sample numbers, so nothing is read ahead; publish its "
        'files in the code (docs/publishing.md, "In the code")'
    ),
    UnknownProperty.STREAM: (
        "not understood: cachefs cannot see in advance what an IterableDataset reads; publish its shards with "
        'cachefs.publish (docs/publishing.md, "Shards and streams")'
    ),
}


def unknown_text(unknown: UnknownProperty, dataset: str, sampler: str, location: str = "") -> str:
    """Return one line about *unknown*. dataset, sampler: class names; location: the line that made the loader."""
    text = _TEXTS[unknown].format(sampler=_printable_name(sampler, "its sampler"))
    return f"loader {loader_name(dataset, location)}: {text}"


def loader_name(dataset: str, location: str = "") -> str:
    """Return the name of a loader: the class of its dataset, and the line that made it, where that is known."""
    where = f" ({_printable_name(location, 'somewhere')})" if location else ""
    return f"{_printable_name(dataset, 'of a dataset')}{where}"


def known_text(name: str, samples: int, epoch: int, *, by_rule: bool) -> str:
    """Return one line about a loader whose order is known. name: of the loader; samples: per epoch; epoch: the first
    that is read ahead, counted from 1."""
    how = " (which file each sample reads was inferred from its first reads)" if by_rule else ""
    return f"loader {name}: {format_count(samples, 'sample')} an epoch, read ahead from epoch {epoch} on{how}"


def shards_text(name: str, shards: int, epoch: int) -> str:
    """Return the line of `known_text` for a stream of shards."""
    return f"loader {name}: {format_count(shards, 'shard')} an epoch, read ahead from epoch {epoch} on"


def unsettled_text(name: str) -> str:
    """Return one line about a loader that ended before it was understood."""
    return f"loader {name}: it ended before it was understood"


def learned_text(name: str, epoch: int) -> str:
    """Return one line about a loader whose files were learned without an earlier line that announced it. epoch: the
    first that is read ahead, counted from 1."""
    return f"loader {name}: its files were learned, and it is read ahead from epoch {epoch} on"


def _printable_name(name: str, otherwise: str) -> str:
    return name[:MAX_NAME] if name.isprintable() and name else otherwise


@dataclass(slots=True)
class UnexplainedFiles:
    """Counts observed samples and files for which no rule is known."""

    # A set, since a long batch is reported in parts, each with all of its samples.
    _samples: set[int] = field(default_factory=set)
    _files: set[str] = field(default_factory=set)

    def add_opened(self, samples: Sequence[int], paths: tuple[str, ...]) -> None:
        """Record that these paths were opened for these samples."""
        if len(self._samples) < MIN_SAMPLES:
            self._samples.update(samples)
        for path in paths:
            if len(self._files) < MIN_FILES:
                self._files.add(path)

    @property
    def unknown(self) -> UnknownProperty | None:
        """The unknown property of the loader; None while too few samples were observed."""
        if len(self._samples) < MIN_SAMPLES or not self._files:
            return None
        return UnknownProperty.FILES if len(self._files) >= MIN_FILES else UnknownProperty.PARTS
