"""Lists and evicts the cached blocks of a snapshot. Plain walks over snapshot and index; call in a thread."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from cachefs.block import CONTENT_ID_SIZE, MAX_LOCATED_BLOCKS, TIER_NAMES, block_count, block_key, describe_tiers
from cachefs.errors import NotFound
from cachefs.messages import CachedFile, CachedFiles, EvictedAmount, FileInfo, FilePath
from cachefs.snapshot import Entry, Snapshot
from cachefs_daemon.datasets.selection import is_below, normal_path
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.index_writer import IndexWriter

# Blocks per call of the store, which holds its lock meanwhile.
EVICT_BATCH: Final = 1024
# Files per page, at most, and approximate seconds to make one.
MAX_FILES_PER_PAGE: Final = 1000
PAGE_SECONDS: Final = 0.25


def cached_bytes(index: IndexWriter, snapshot: Snapshot) -> dict[str, int]:
    """Return the cached bytes of the snapshot's files, by name of the tier."""
    present = cached_contents(index)
    wanted = {entry.content for entry in snapshot.walk_files(snapshot.entry(0)) if entry.content in present}
    total = [0] * len(TIER_NAMES)
    for content in wanted:
        for tier, size in enumerate(_bytes_per_tier(index, content)):
            total[tier] += size
    return dict(zip(TIER_NAMES, total, strict=True))


def file_pages(
    index: IndexWriter, snapshot: Snapshot, files: Iterable[Entry], pins: Sequence[bytes]
) -> Iterator[CachedFiles]:
    """Yield what is cached of each of *files*, in pages of at most MAX_FILES_PER_PAGE files that take about
    PAGE_SECONDS each.

    pins: pinned paths of the dataset.
    """
    page: list[CachedFile] = []
    due = time.monotonic() + PAGE_SECONDS
    for entry in files:
        path = snapshot.path(entry.number)
        pinned = any(is_below(path, pin) for pin in pins)
        cached = _bytes_per_tier(index, entry.content)
        page.append(CachedFile(path=path, size=entry.size, cached=cached, pinned=pinned))
        if len(page) == MAX_FILES_PER_PAGE or time.monotonic() >= due:
            yield CachedFiles(files=page)
            page, due = [], time.monotonic() + PAGE_SECONDS
    yield CachedFiles(files=page)


def file_info(index: IndexWriter, snapshot: Snapshot, path: FilePath) -> FileInfo:
    """Return the metadata of a file or directory, and the tiers of its blocks. Raises NotFound."""
    entry = snapshot.find_path(normal_path(path.path))
    if entry is None:
        raise NotFound(f"{path.dataset} has no {path.path.decode(errors='backslashreplace')!r}")
    count = 0 if entry.is_dir else block_count(entry.size, snapshot.block_size)
    keys = [block_key(entry.content, block) for block in range(min(count, MAX_LOCATED_BLOCKS))]
    return FileInfo(
        dataset=path.dataset,
        snapshot=snapshot.id,
        path=snapshot.path(entry.number),
        directory=entry.is_dir,
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        etag=b"" if entry.is_dir else entry.version.replace(b"\0", b"@"),
        tiers=describe_tiers(index.get_many(keys), count),
    )


def evict(store: BlockStore, index: IndexWriter, files: Iterable[Entry]) -> EvictedAmount:
    """Evict all blocks of *files*, including pinned ones."""
    present = cached_contents(index)
    return _evict(store, index, {entry.content for entry in files if entry.content in present})


def evict_unshared(
    store: BlockStore, index: IndexWriter, removed: Iterable[Snapshot], kept: Iterable[Snapshot]
) -> EvictedAmount:
    """Evict the blocks of the files in the *removed* snapshots that are in none of the *kept* snapshots."""
    present = cached_contents(index)
    doomed = {entry.content for entry in _all_files(removed) if entry.content in present}
    for entry in _all_files(kept):
        doomed.discard(entry.content)
    return _evict(store, index, doomed)


def _all_files(snapshots: Iterable[Snapshot]) -> Iterator[Entry]:
    return (entry for snapshot in snapshots for entry in snapshot.walk_files(snapshot.entry(0)))


def cached_contents(index: IndexWriter) -> set[bytes]:
    """Return the content ids of files with any block on this node."""
    return {key[:CONTENT_ID_SIZE] for keys in index.key_batches(EVICT_BATCH) for key in keys}


def _bytes_per_tier(index: IndexWriter, content: bytes) -> list[int]:
    cached = [0] * len(TIER_NAMES)
    for _, location in index.blocks_of(content):
        cached[location.tier] += location.length
    return cached


def _evict(store: BlockStore, index: IndexWriter, contents: Iterable[bytes]) -> EvictedAmount:
    keys = (key for content in contents for key, _ in index.blocks_of(content))
    blocks = size = 0
    while batch := list(itertools.islice(keys, EVICT_BATCH)):
        evicted, freed = store.evict(batch)
        blocks += evicted
        size += freed
    return EvictedAmount(blocks=blocks, bytes=size)
