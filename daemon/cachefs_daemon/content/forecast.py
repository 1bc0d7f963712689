"""Forecasts the effect of a warmup or an eviction. Plain walks over snapshot and index; call in a thread."""

from collections.abc import Iterable, Sequence

from cachefs.block import block_count
from cachefs.messages import DatasetAmount, EvictForecast, WarmupForecast, WarmupRequest
from cachefs.snapshot import Entry, Snapshot
from cachefs_daemon.content.inventory import cached_contents
from cachefs_daemon.content.warmup import plan_warmup
from cachefs_daemon.datasets.selection import files, is_below
from cachefs_daemon.store.index_writer import IndexWriter


def warmup(snapshot: Snapshot, request: WarmupRequest, index: IndexWriter, free: int) -> WarmupForecast:
    """Forecast a warmup. free: bytes of free room in the tiers. Raises NotFound, ConfigError."""
    plan = plan_warmup(snapshot, request)
    present = cached_contents(index)
    entries = (snapshot.entry(number) for number in plan.files)
    here = _cached_amount(index, (entry for entry in entries if entry.content in present), snapshot.block_size)
    return WarmupForecast(
        wanted=DatasetAmount(files=len(plan.files), blocks=plan.blocks, bytes=plan.bytes), here=here, free=free
    )


def evict(snapshot: Snapshot, paths: Sequence[bytes], pins: Sequence[bytes], index: IndexWriter) -> EvictForecast:
    """Forecast an eviction. pins: pinned paths of the dataset. Raises NotFound."""
    chosen = files(snapshot, paths)
    everything: list[Entry] = []
    pinned: list[Entry] = []
    present = cached_contents(index)
    for entry in chosen:
        if entry.content in present:
            everything.append(entry)
            if pins and any(is_below(snapshot.path(entry.number), pin) for pin in pins):
                pinned.append(entry)
    size = snapshot.block_size
    return EvictForecast(here=_cached_amount(index, everything, size), pinned=_cached_amount(index, pinned, size))


def _cached_amount(index: IndexWriter, entries: Iterable[Entry], block_size: int) -> DatasetAmount:
    """Return what is cached of these files. A file that lacks a block does not count as a file."""
    files = blocks = size = 0
    for entry in entries:
        found = [location.length for _, location in index.blocks_of(entry.content)]
        files += bool(found) and len(found) >= block_count(entry.size, block_size)
        blocks += len(found)
        size += sum(found)
    return DatasetAmount(files=files, blocks=blocks, bytes=size)
