"""What of a snapshot is on this node, and removing it. Plain walks over snapshot and index: call them in a thread."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from cachefs.block import CONTENT_ID_SIZE, TIER_NAMES
from cachefs.messages import CachedFile, CachedFiles, Freed
from cachefs.snapshot import Entry, Snapshot
from cachefs_daemon.datasets.selection import is_below
from cachefs_daemon.store.block_store import BlockStore

# Blocks per call of the store, which holds its lock meanwhile.
BATCH: Final = 1024
PAGE: Final = 1000
PAGE_SECONDS: Final = 0.25


def cached_bytes(store: BlockStore, snapshot: Snapshot) -> dict[str, int]:
    """Tier name -> bytes of the snapshot's files in it."""
    present = _contents(store)
    wanted = {entry.content for entry in snapshot.walk(snapshot.entry(0)) if entry.content in present}
    total = [0] * len(TIER_NAMES)
    for content in wanted:
        for tier, size in enumerate(_bytes_per_tier(store, content)):
            total[tier] += size
    return dict(zip(TIER_NAMES, total, strict=True))


def pages(
    store: BlockStore, snapshot: Snapshot, files: Iterable[Entry], pins: Sequence[bytes]
) -> Iterator[CachedFiles]:
    """All *files* with what is cached of each, in pages of at most PAGE files that take about PAGE_SECONDS each."""
    page: list[CachedFile] = []
    due = time.monotonic() + PAGE_SECONDS
    for entry in files:
        path = snapshot.path(entry.number)
        pinned = any(is_below(path, pin) for pin in pins)
        cached = _bytes_per_tier(store, entry.content)
        page.append(CachedFile(path=path, size=entry.size, cached=cached, pinned=pinned))
        if len(page) == PAGE or time.monotonic() >= due:
            yield CachedFiles(files=page)
            page, due = [], time.monotonic() + PAGE_SECONDS
    yield CachedFiles(files=page)


def evict(store: BlockStore, files: Iterable[Entry]) -> Freed:
    """Drop every block of *files*, pinned ones too."""
    present = _contents(store)
    return _evict(store, {entry.content for entry in files if entry.content in present})


def evict_unshared(store: BlockStore, removed: Iterable[Snapshot], kept: Iterable[Snapshot]) -> Freed:
    """Drop the blocks of the files in *removed* that are in none of the *kept* snapshots."""
    present = _contents(store)
    doomed = {entry.content for entry in _all_files(removed) if entry.content in present}
    for entry in _all_files(kept):
        doomed.discard(entry.content)
    return _evict(store, doomed)


def _all_files(snapshots: Iterable[Snapshot]) -> Iterator[Entry]:
    return (entry for snapshot in snapshots for entry in snapshot.walk(snapshot.entry(0)))


def _contents(store: BlockStore) -> set[bytes]:
    keys = store.keys()
    return {key[:CONTENT_ID_SIZE] for key in keys}


def _bytes_per_tier(store: BlockStore, content: bytes) -> list[int]:
    cached = [0] * len(TIER_NAMES)
    for _, location in store.blocks_of(content):
        cached[location.tier] += location.length
    return cached


def _evict(store: BlockStore, contents: Iterable[bytes]) -> Freed:
    keys = (key for content in contents for key, _ in store.blocks_of(content))
    blocks = size = 0
    while batch := list(itertools.islice(keys, BATCH)):
        evicted, freed = store.evict(batch)
        blocks += evicted
        size += freed
    return Freed(blocks=blocks, bytes=size)
