"""Calls whose caller goes away while the daemon changes several things for it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from cachefs.messages import DatasetAddRequest, DatasetName, Selection
from cachefs_daemon import config as configuration
from cachefs_daemon.api.service import Service
from cachefs_daemon.datasets import selection
from cachefs_daemon.live_settings import LiveSettings
from cachefs_daemon.node import Node
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockToStore
from cachefs_daemon.store.storage import PlanningParts, Storage
from cachefs_daemon.store_settings import store_config
from tests.waiting import until_async


async def end(stream: AsyncGenerator[object, None]) -> None:
    async for _ in stream:
        pass


async def abandoned(node: Node, work: "asyncio.Task[object]", monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel *work* while the list of datasets is being saved."""
    reached, released = asyncio.Event(), asyncio.Event()
    save = node.catalog._save

    async def slowly() -> None:
        reached.set()
        await released.wait()
        await save()

    monkeypatch.setattr(node.catalog, "_save", slowly)
    await reached.wait()
    work.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    monkeypatch.undo()


def test_a_refresh_and_a_removal_are_done_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "a").write_bytes(b"first")
    config = configuration.parse(
        {
            "daemon": {"socket": str(tmp_path / "s"), "state_dir": str(tmp_path / "state")},
            "memory": {"dir": str(tmp_path / "memory"), "budget": "8MiB", "segment_size": "8MiB", "min_free": 0},
        }
    )
    storage, threads = Storage(store_config(config), PlanningParts.empty()), Threads()

    async def scene() -> None:
        node = Node(config, storage, threads, ErrorLog())
        service = Service(node, LiveSettings(node, lambda: config))

        def pinned() -> int:
            snapshot = node.catalog.snapshot("d")
            keys = [key for entry in selection.files(snapshot, []) for key in selection.block_keys(snapshot, entry)]
            with storage.tiering as tiering:
                return len(keys) - len(tiering.filter_unpinned(keys))

        await end(service.dataset_add(DatasetAddRequest(name="d", url=f"file://{origin}")))
        await service.pin(Selection(dataset="d"))
        assert pinned() == 1
        (origin / "b").write_bytes(b"second")
        before = node.catalog.snapshot("d").id
        refresh = asyncio.create_task(end(service.dataset_refresh(DatasetName(name="d"))))
        await abandoned(node, refresh, monkeypatch)
        await until_async(lambda: pinned() == 2)
        assert node.catalog.snapshot("d").id != before
        keys = [
            key
            for entry in selection.files(node.catalog.snapshot("d"), [])
            for key in selection.block_keys(node.catalog.snapshot("d"), entry)
        ]
        for key in keys:
            storage.blocks.put_many([BlockToStore(key, b"x")])
        removal = asyncio.create_task(service.dataset_remove(DatasetName(name="d")))
        await abandoned(node, removal, monkeypatch)
        await until_async(lambda: not storage.index.count_keys())
        with storage.tiering as tiering:
            assert tiering.filter_unpinned(keys) == keys
        await node.stop()

    try:
        asyncio.run(scene())
    finally:
        threads.close()
        storage.close()
