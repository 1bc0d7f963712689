"""Tells whether paths in a dataset or in the program's arguments lie below a mount of cachefs."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachefs.publishing.columns import Listing
from cachefs.publishing.foreign import mode_of
from cachefs.publishing.places import Places
from cachefs.publishing.sample_files import listed_files

# Number of files of a list that are tested for whether they lie below a mount.
PROBES: Final = 16
# Maximum number of the program's arguments that are examined, and maximum length of a path in characters.
MOST_ARGUMENTS: Final = 64
MOST_CHARACTERS: Final = 4095


@dataclass(frozen=True, slots=True)
class Listed:
    """The files that a dataset lists."""

    # The path of each sample below a mount; None where the files have to be learned.
    files: Sequence[str] | None
    # Whether the files exist, and lie below no mount.
    is_elsewhere: bool = False


def files_of(dataset: Any, found: Listing, length: int | None, points: Places) -> Listed:
    """Return the files of the samples, if the dataset lists them. found: the dataset's listing; length: number of
    samples, where known; points: the mounts."""
    probes: Sequence[str] = []

    def are_below_a_mount(paths: Sequence[str]) -> bool:
        nonlocal probes
        probes = paths
        return any(map(points.mount_of, paths))

    files = listed_files(dataset, length, known=found, is_wanted=are_below_a_mount)
    if files is not None:
        probes = files[:: max(1, len(files) // PROBES)]
    if are_below_a_mount(probes):
        return Listed(files)
    # Other paths may be those of another machine, or relative to another directory.
    return Listed(None, is_elsewhere=any(mode_of(path, follow=False) for path in probes))


def names_a_mount(found: Listing) -> bool:
    """Return whether an attribute of the dataset, or an argument of the program, names a mount or a path below one."""
    arguments = (argument.rpartition("=")[2] for argument in sys.argv[1 : 1 + MOST_ARGUMENTS])
    # The slash makes the mount itself count as well as paths in it.
    return _are_below_a_mount(text + "/" for text in (*found.roots, *_firsts(found), *arguments) if text)


def lists_files_of_a_mount(found: Listing) -> bool:
    """Return whether an attribute of the dataset lists files below a mount."""
    return _are_below_a_mount(_firsts(found))


def _firsts(found: Listing) -> list[str]:
    return [source.first for source in found.sources if isinstance(source.first, str)]


def _are_below_a_mount(texts: Iterable[str]) -> bool:
    points = Places()
    names = (text for text in texts if text and "\0" not in text and len(text) <= MOST_CHARACTERS)
    ends = ((os.path.abspath(text), "/" if text.endswith("/") else "") for text in names)
    return any(points.mount_of(path + end) is not None for path, end in ends)
