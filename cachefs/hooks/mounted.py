"""Tells whether paths in a dataset or in the program's arguments lie below a mount of cachefs."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachefs.publishing.files.listed import DatasetListing
from cachefs.publishing.files.sample_files import listed_files
from cachefs.publishing.job_exceptions import mode_of
from cachefs.publishing.mount_resolver import MountResolver

# Number of files of a list that are tested for whether they lie below a mount.
PROBES: Final = 16
# Maximum number of the program's arguments that are examined, and maximum length of a path in characters.
MAX_ARGUMENTS: Final = 64
MAX_PATH_CHARACTERS: Final = 4095


@dataclass(frozen=True, slots=True)
class ListedFiles:
    """The files that a dataset lists."""

    # The path of each sample below a mount; None where the files have to be learned.
    files: Sequence[str] | None
    # Whether the files exist, and lie below no mount.
    is_outside_mounts: bool = False


def find_listed_files(
    dataset: Any, dataset_listing: DatasetListing, length: int | None, resolver: MountResolver
) -> ListedFiles:
    """Return the files of the samples, if the dataset lists them. dataset_listing: the dataset's listing; length:
    number of samples, where known; resolver: the mounts."""
    probes: Sequence[str] = []

    def are_below_a_mount(paths: Sequence[str]) -> bool:
        nonlocal probes
        probes = paths
        return any(map(resolver.mount_of, paths))

    files = listed_files(dataset, length, dataset_listing=dataset_listing, is_wanted=are_below_a_mount)
    if files is not None:
        probes = files[:: max(1, len(files) // PROBES)]
    if are_below_a_mount(probes):
        return ListedFiles(files)
    # Other paths may be those of another machine, or relative to another directory.
    return ListedFiles(None, is_outside_mounts=any(mode_of(path, follow=False) for path in probes))


def has_mount_path(dataset_listing: DatasetListing) -> bool:
    """Return whether an attribute of the dataset, or an argument of the program, names a mount or a path below one."""
    arguments = (argument.rpartition("=")[2] for argument in sys.argv[1 : 1 + MAX_ARGUMENTS])
    # The slash makes the mount itself count as well as paths in it.
    return _has_path_below_mount(
        text + "/" for text in (*dataset_listing.roots, *_first_paths(dataset_listing), *arguments) if text
    )


def has_listed_mount_files(dataset_listing: DatasetListing) -> bool:
    """Return whether an attribute of the dataset lists files below a mount."""
    return _has_path_below_mount(_first_paths(dataset_listing))


def _first_paths(dataset_listing: DatasetListing) -> list[str]:
    return [source.first_entry for source in dataset_listing.listed_columns if isinstance(source.first_entry, str)]


def _has_path_below_mount(texts: Iterable[str]) -> bool:
    points = MountResolver()
    names = (text for text in texts if text and "\0" not in text and len(text) <= MAX_PATH_CHARACTERS)
    ends = ((os.path.abspath(text), "/" if text.endswith("/") else "") for text in names)
    return any(points.mount_of(path + end) is not None for path, end in ends)
