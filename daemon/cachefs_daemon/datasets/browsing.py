"""Lists a directory of a snapshot, for users who may not read the snapshot's file."""

import itertools
from collections.abc import Iterator
from typing import Final

from cachefs.errors import NotFound
from cachefs.messages import DirectoryEntries, DirectoryEntry
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets.selection import normal_path

# Entries of one page: some 10 ms to create, and 100 KB to send.
ENTRIES_PER_PAGE: Final = 4096


def directory_pages(snapshot: Snapshot, dataset: str, path: bytes) -> Iterator[DirectoryEntries]:
    """Yield the entries of the directory at *path*, or the file there. Call it, and take each step, in a thread. Raises
    NotFound."""
    entry = snapshot.find_path(normal_path(path))
    if entry is None:
        raise NotFound(f"{dataset} has no {path.decode(errors='backslashreplace')!r}")
    found = snapshot.children(entry) if entry.is_dir else iter([entry])
    while batch := list(itertools.islice(found, ENTRIES_PER_PAGE)):
        entries = [DirectoryEntry(name=one.name, directory=one.is_dir, size=one.size) for one in batch]
        yield DirectoryEntries(entries=entries)
