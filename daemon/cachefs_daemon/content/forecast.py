"""What a warmup or an eviction would do, found without doing it. Plain walks, to be called in a thread."""

from collections.abc import Iterable, Sequence

from cachefs.block import block_count
from cachefs.messages import EvictForecast, Held, Warmup, WarmupForecast
from cachefs.snapshot import Entry, Snapshot
from cachefs_daemon.content.inventory import contents
from cachefs_daemon.content.warmup import plan
from cachefs_daemon.datasets.selection import files, is_below
from cachefs_daemon.store.index_writer import IndexWriter


def warmup(snapshot: Snapshot, request: Warmup, index: IndexWriter, free: int) -> WarmupForecast:
    """free: bytes that the tiers have room for now. Raises NotFound, ConfigError."""
    wanted = plan(snapshot, request)
    present = contents(index)
    asked = (snapshot.entry(number) for number in wanted.files)
    here = _held(index, (entry for entry in asked if entry.content in present), snapshot.block_size)
    return WarmupForecast(
        wanted=Held(files=len(wanted.files), blocks=wanted.blocks, bytes=wanted.bytes), here=here, free=free
    )


def evict(snapshot: Snapshot, paths: Sequence[bytes], pins: Sequence[bytes], index: IndexWriter) -> EvictForecast:
    """pins: paths of the dataset that are pinned. Raises NotFound."""
    chosen = files(snapshot, paths)
    everything: list[Entry] = []
    pinned: list[Entry] = []
    present = contents(index)
    for entry in chosen:
        if entry.content in present:
            everything.append(entry)
            if pins and any(is_below(snapshot.path(entry.number), pin) for pin in pins):
                pinned.append(entry)
    size = snapshot.block_size
    return EvictForecast(here=_held(index, everything, size), pinned=_held(index, pinned, size))


def _held(index: IndexWriter, entries: Iterable[Entry], block_size: int) -> Held:
    """What is on this node of these files. A file of which a block lacks is not counted as a file."""
    whole = blocks = size = 0
    for entry in entries:
        found = [location.length for _, location in index.blocks_of(entry.content)]
        whole += bool(found) and len(found) >= block_count(entry.size, block_size)
        blocks += len(found)
        size += sum(found)
    return Held(files=whole, blocks=blocks, bytes=size)
