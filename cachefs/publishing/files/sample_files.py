"""Finds the file of each sample of a dataset that has a list of them."""

import inspect
import os
import stat
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any, Final, cast

import numpy

from cachefs.publishing.files.listed import (
    DatasetListing,
    ListedColumn,
    column_deadline,
    read_listing,
    take_values,
    text_of,
    texts_of,
)
from cachefs.publishing.job_exceptions import mode_of
from cachefs.publishing.job_objects import is_in_memory, length_of

# Attributes of torchvision's and many other datasets with a path per sample, or a tuple that begins with the path.
LIST_NAMES: Final = (
    "samples", "imgs", "image_paths", "img_paths", "file_paths", "paths", "files", "file_list", "filenames",
    "image_files", "img_files", "images", "_image_files", "_images",
)  # fmt: skip
# Number of paths tested for existence, where nothing else shows that the texts are paths.
PROBES: Final = 16


def listed_files(
    dataset: Any,
    length: int | None = None,
    dataset_listing: DatasetListing | None = None,
    is_wanted: Callable[[Sequence[str]], bool] = lambda paths: True,
) -> list[str] | None:
    """Return the path of each sample's file, or None where the dataset has no list of them.

    The dataset may be a list of paths, or of rows with a path; torch's Subset or ConcatDataset of datasets with a list;
    or a Hugging Face dataset with a column of images, audio or video that refers to files. Attributes are read as
    stored in the object: no property and no other code of the dataset's is run. A list that takes longer than
    COLUMN_SECONDS (see cachefs.publishing.files.listed) is ignored.

    length: number of samples, where the caller knows it; dataset_listing: the dataset's listing, where the caller has
    it; is_wanted: called with some of the paths before all of them are taken.
    """
    torch_datasets = sys.modules.get("torch.utils.data.dataset")
    kind = type(dataset)  # isinstance may ask a dataset for its __class__
    if torch_datasets is not None and issubclass(kind, torch_datasets.Subset):
        parent, chosen = inspect.getattr_static(dataset, "dataset", None), _subset_indices(dataset)
        paths = listed_files(parent, is_wanted=is_wanted) if chosen is not None else None
        return None if paths is None or chosen is None else [paths[index] for index in chosen]
    if torch_datasets is not None and issubclass(kind, torch_datasets.ConcatDataset):
        listed = inspect.getattr_static(dataset, "datasets", None)
        parts = [listed_files(part) for part in listed] if type(listed) is list else [None]
        return None if None in parts else [path for part in parts if part is not None for path in part]
    hugging_face = sys.modules.get("datasets.arrow_dataset")
    if hugging_face is not None and issubclass(kind, hugging_face.Dataset):
        return _hugging_face_paths(dataset)
    length = length_of(dataset) if length is None else length
    if length is None:
        return None
    found = read_listing(dataset) if dataset_listing is None else dataset_listing
    for entries in (found.rows, *(inspect.getattr_static(dataset, name, None) for name in LIST_NAMES)):
        if not _is_path_list(entries):
            continue
        probes = _take_paths(entries[:: max(1, length // PROBES)]) if len(entries) == length else None
        if probes is None or not _are_absolute_or_exist(probes):
            continue
        if not is_wanted(probes):
            return None
        if (paths := _take_paths(entries)) is not None:
            return paths
    return _paths_of_only_column(found, length)


def _subset_indices(subset: Any) -> list[int] | None:
    """Return the samples of a subset; None where only code of the job's could compute them."""
    indices = inspect.getattr_static(subset, "indices", None)
    is_array = type(indices) is numpy.ndarray and is_in_memory(indices)
    if is_array or (type(indices) is sys.modules["torch"].Tensor and indices.device.type == "cpu"):
        indices = indices.tolist()
    if type(indices) not in (list, tuple, range):
        return None
    plain = all(kind is int or kind.__module__ == "numpy" for kind in set(map(type, indices)))
    return list(indices) if plain else None


def _paths_of_only_column(found: DatasetListing, length: int) -> list[str] | None:
    """Return the paths of the only column, in any attribute, that has one existing path per sample. Relative paths are
    joined with a directory that the dataset names."""
    candidates = [source for source in found.listed_columns if isinstance(source.first_entry, str)]
    if not candidates:
        return None
    candidates = [source for source in candidates if source.rows == length]
    absolute = [source for source in candidates if str(source.first_entry).startswith(os.sep)]
    roots = ["", *(() if absolute else found.roots)]
    fitting = [(root, source) for source in absolute or candidates for root in roots if _is_file(root, source)]
    if len({id(source) for _, source in fitting}) != 1:
        return None  # none, or an image and a mask, which need not both be read
    root, source = fitting[0]
    values = source.take_entries(column_deadline())
    if values is None:
        return None
    paths = [os.path.join(root, str(value)) for value in values]
    return paths if _do_exist(paths) else None


def _are_absolute_or_exist(paths: list[str]) -> bool:
    """Return whether the paths are absolute, or exist. The dataset joins other paths with a directory."""
    return os.path.isabs(paths[0]) or _do_exist(paths)


def _do_exist(paths: list[str]) -> bool:
    return all(mode_of(path, follow=False) for path in paths[:: max(1, len(paths) // PROBES)])


def _is_file(root: str, source: ListedColumn) -> bool:
    path = os.path.join(root, str(source.first_entry))
    return stat.S_ISREG(mode_of(path))


def _is_path_list(entries: Any) -> bool:
    """Return whether this is a list, or a 1-D array, whose first element looks like a path. Any other object may be of
    any size, and may run any code, so it is not touched."""
    if type(entries) is numpy.ndarray:
        is_list = entries.ndim == 1 and entries.dtype.kind in "UO"
    else:
        is_list = type(entries) in (list, tuple)
    if not is_list or not len(entries):
        return False
    first = entries[0]
    return _is_path(first[0] if type(first) in (list, tuple) and first else first)


def _is_path(value: Any) -> bool:
    """Return whether the value is a path with a directory. A bare name could be anything."""
    text = text_of(value)
    return text is not None and type(value) is not bytes and os.sep in text


def _take_paths(entries: Any) -> list[str] | None:
    """Return the path in each entry; None where the entries are of different kinds, or taking them takes too long."""
    in_tuples = type(entries[0]) in (list, tuple)
    return cast(list[str] | None, take_values(entries, partial(_paths_in_piece, in_tuples), column_deadline()))


def _paths_in_piece(in_tuples: bool, entries: Any) -> list[str] | None:
    """Return the path in each of some entries, which are tuples that begin with it, or the paths themselves."""
    entries = entries.tolist() if type(entries) is numpy.ndarray else entries
    if in_tuples:
        if not all(type(entry) in (list, tuple) and entry for entry in entries):
            return None
        entries = list(map(itemgetter(0), entries))
    texts = texts_of(entries)
    return None if None in texts else cast(list[str], texts)


def _hugging_face_paths(dataset: Any) -> list[str] | None:
    """Return the paths from the Arrow table itself, in 0.1 s for 1.28 M rows; reading the rows would take minutes."""
    compute = import_module("pyarrow.compute")
    for name, feature in dataset.features.items():
        if type(feature).__name__ in ("Image", "Audio", "Video"):
            column = dataset.data.column(name)
            if compute.struct_field(column, "bytes").null_count < len(column):
                return None  # the content of the files is in the table itself
            paths: list[str] = compute.struct_field(column, "path").to_pylist()
            chosen = dataset._indices  # the rows of a shuffled or filtered dataset
            return paths if chosen is None else [paths[row] for row in chosen.column(0).to_pylist()]
    return None
