"""Compares the files published for samples with the files opened: a dataset may use its list in an unexpected way."""

from collections.abc import Sequence

import numpy

from cachefs.inodes import slots_and_entries
from cachefs.publishing.files.inference import MatchCounts, OpenedFiles
from cachefs.publishing.files.shares import FileShare


class FileComparison:
    """Counts how often published files of one consumer differ from the opened ones."""

    def __init__(self) -> None:
        self._counts = MatchCounts()

    @property
    def is_wrong(self) -> bool:
        return self._counts.is_too_wrong

    def compare_opened(self, observed: OpenedFiles, inodes: Sequence[int], shares: Sequence[FileShare]) -> None:
        """inodes: numbers of the files that were opened for the samples."""
        slots, entries = slots_and_entries(numpy.array(inodes, numpy.int64))
        opened = set(zip(slots.tolist(), entries.tolist(), strict=True))
        said = [_published_files(sample, shares) for sample in observed.samples]
        known = [files for files in said if files]
        if not observed.is_complete:
            # Files in the page cache are not seen, but each file that is seen has to be of one of the samples.
            strange = len(opened.difference(*known)) if len(known) == len(said) else 0
            self._counts.add_samples(min(len(known), len(opened)), min(len(known), strange))
            return
        # A sample that is kept in memory is not opened again, alone or in a batch.
        wrong = sum(not files & opened for files in known) if opened else 0
        self._counts.add_samples(len(known), wrong)


def _published_files(sample: int, shares: Sequence[FileShare]) -> set[tuple[int, int]]:
    """Return the slots and entries of the sample's files, as they were published."""
    found = set()
    for share in shares:
        begin, end = numpy.searchsorted(share.samples, [sample, sample + 1])
        found |= {(share.slot, int(entry)) for entry in share.entries[begin:end]}
    return found
