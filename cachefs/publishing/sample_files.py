"""Which file each sample of a dataset is, where the dataset has a list of them."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

# Attributes that have it in torchvision's datasets and in many others: a path per sample, or a tuple that begins with
# the path.
LIST_NAMES: Final = (
    "samples", "imgs", "image_paths", "img_paths", "file_paths", "paths", "files", "file_list", "filenames",
    "image_files", "img_files", "images", "_image_files", "_images",
)  # fmt: skip


def listed_files(dataset: Any) -> list[str] | None:
    """Path of each sample's file, or None where the dataset has no such list.

    The dataset may also be torch's Subset or ConcatDataset of datasets that have a list, or a Hugging Face dataset with
    a column of images, audio or video that refers to files.
    """
    torch_datasets = sys.modules.get("torch.utils.data.dataset")
    if torch_datasets is not None and isinstance(dataset, torch_datasets.Subset):
        whole = listed_files(dataset.dataset)
        return None if whole is None else [whole[index] for index in dataset.indices]
    if torch_datasets is not None and isinstance(dataset, torch_datasets.ConcatDataset):
        parts = [listed_files(part) for part in dataset.datasets]
        return None if None in parts else [path for part in parts if part is not None for path in part]
    hugging_face = sys.modules.get("datasets.arrow_dataset")
    if hugging_face is not None and isinstance(dataset, hugging_face.Dataset):
        return _of_hugging_face(dataset)
    for name in LIST_NAMES:
        found = _paths(getattr(dataset, name, None), dataset)
        if found is not None:
            return found
    return None


def _paths(entries: Any, dataset: Any) -> list[str] | None:
    entries = entries.tolist() if hasattr(entries, "tolist") else entries
    if not isinstance(entries, Sequence) or isinstance(entries, (str, bytes)):
        return None
    try:
        if not entries or len(entries) != len(dataset):
            return None
        first = entries[0]
        if _is_path(first):
            return [os.fsdecode(entry) for entry in entries]
        if isinstance(first, (tuple, list)) and first and _is_path(first[0]):
            return [os.fsdecode(entry[0]) for entry in entries]
    except (TypeError, IndexError, KeyError):
        return None  # the entries are of different kinds
    return None


def _is_path(value: Any) -> bool:
    """Is it a path with a directory? A bare name could be anything."""
    return isinstance(value, (str, os.PathLike)) and os.sep in str(value)


def _of_hugging_face(dataset: Any) -> list[str] | None:
    """Takes them from the Arrow table itself, in 0.1 s for 1.28 M rows; through the rows it would take minutes."""
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
