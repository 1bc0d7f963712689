"""Pins: paths of datasets whose blocks no policy may evict. They outlive restarts and follow refreshes.

A pin is recorded first and then applied, and neither is cancelled with the caller: so the tiers match the record, at
the latest after the next start.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Final

from cachefs.errors import NotFound
from cachefs.messages import PinnedAmount, Selection
from cachefs.planning.eviction.tiering import Tiering
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets import selection
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.shielded import shielded
from cachefs_daemon.runtime.threads import Threads

# Keys pinned at once, under the lock.
KEYS_PER_BATCH: Final = 4096


class Pins:
    """Keeps the pinned keys of the tiers equal to the datasets' records."""

    def __init__(self, tiering: Locked[Tiering], catalog: Catalog, threads: Threads) -> None:
        self._tiering = tiering
        self._catalog = catalog
        self._threads = threads
        self._changing = asyncio.Lock()

    async def pin(self, request: Selection) -> PinnedAmount:
        """Pin the selected paths; without paths, the whole dataset. Raises NotFound."""
        return await shielded(self._pin_selected(request))

    async def _pin_selected(self, request: Selection) -> PinnedAmount:
        async with self._changing:
            snapshot = self._catalog.snapshot(request.dataset)
            paths = selection.distinct(request.paths or [b""])
            await self._threads.background(selection.files, snapshot, paths)  # raises NotFound for missing paths
            known = self._catalog.get(request.dataset).record.pins
            await self._catalog.set_pins(request.dataset, selection.distinct([*known, *paths]))
            return await self._threads.background(_change_pins, self._pin, snapshot, paths)

    async def unpin(self, request: Selection) -> PinnedAmount:
        """Remove the pins at the given paths; without paths, all pins of the dataset.

        Raises NotFound if a path is not a pin itself.
        """
        return await shielded(self._unpin_selected(request))

    async def _unpin_selected(self, request: Selection) -> PinnedAmount:
        async with self._changing:
            snapshot = self._catalog.snapshot(request.dataset)
            known = self._catalog.get(request.dataset).record.pins
            paths = selection.distinct(request.paths) if request.paths else known
            for path in paths:
                if path not in known:
                    raise NotFound(_not_pinned_text(path, known, request.dataset))
            await self._catalog.set_pins(request.dataset, [pin for pin in known if pin not in paths])
            released = await self._threads.background(
                _change_pins, self._unpin, snapshot, _existing_paths(snapshot, paths)
            )
            # Other pins may cover some of the same content.
            await self._apply_all()
            return released

    async def move_pins(self, before: Snapshot | None, paths: list[bytes]) -> None:
        """Move the pins at *paths* after a dataset has replaced snapshot *before*, or was removed."""
        if not paths:
            return
        async with self._changing:
            if before is not None:
                await self._threads.background(_change_pins, self._unpin, before, _existing_paths(before, paths))
            await self._apply_all()

    async def apply_records(self) -> None:
        """Apply the pins of all records."""
        async with self._changing:
            await self._apply_all()

    def _pin(self, keys: Iterable[bytes]) -> None:
        with self._tiering as tiering:
            tiering.pin_blocks(keys)

    def _unpin(self, keys: Iterable[bytes]) -> None:
        with self._tiering as tiering:
            tiering.unpin_blocks(keys)

    async def _apply_all(self) -> None:
        for dataset in self._catalog:
            if dataset.current is not None and dataset.record.pins:
                paths = _existing_paths(dataset.current, dataset.record.pins)
                await self._threads.background(_change_pins, self._pin, dataset.current, paths)


def _change_pins(change: Callable[[Iterable[bytes]], None], snapshot: Snapshot, paths: list[bytes]) -> PinnedAmount:
    """Call *change* with batches of the keys of all blocks at or below *paths*; not at all if there are no paths."""
    files = size = 0
    if not paths:
        return PinnedAmount(files=0, bytes=0)
    keys: list[bytes] = []
    for entry in selection.files(snapshot, paths):
        files += 1
        size += entry.size
        keys.extend(selection.block_keys(snapshot, entry))
        if len(keys) >= KEYS_PER_BATCH:
            change(keys)
            keys = []
    change(keys)
    return PinnedAmount(files=files, bytes=size)


def _existing_paths(snapshot: Snapshot, paths: Iterable[bytes]) -> list[bytes]:
    """Return the *paths* that exist in the snapshot. A pinned path may be missing in a newer snapshot; its pin stays,
    since the path may come back."""
    return [path for path in paths if snapshot.find_path(path) is not None]


def _not_pinned_text(path: bytes, known: list[bytes], dataset: str) -> str:
    shown = [pin.decode(errors="backslashreplace") or "/" for pin in itertools.islice(known, 5)]
    pins = ", ".join(shown) + (", …" if len(known) > len(shown) else "") if shown else "nothing"
    return f"{path.decode(errors='backslashreplace') or '/'} is not a pin of {dataset}; pinned there: {pins}"
