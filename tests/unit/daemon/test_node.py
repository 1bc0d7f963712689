"""What the node does from time to time."""

import asyncio
import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachefs.block import MEMORY, SSD
from cachefs_daemon import config as configuration
from cachefs_daemon import node as node_module
from cachefs_daemon.node import Node
from cachefs_daemon.node_cluster import NO_CLUSTER
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import PlanningParts, Storage
from cachefs_daemon.store_settings import store_config
from cachefs_daemon.troubles import NodeExamination, TroubleInputs


def test_what_hangs_on_a_disk_keeps_nobody_from_looking_at_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MAINTENANCE_SECONDS", 0.01)
    tier = {"budget": "8MiB", "segment_size": "8MiB", "min_free": 0}
    config = configuration.parse(
        {
            "daemon": {"socket": str(root / "s"), "state_dir": str(root / "state")},
            "memory": {"dir": str(root / "memory"), **tier},
            "ssd": {"dir": str(root / "ssd"), **tier},
        }
    )
    storage, threads = Storage(store_config(config), PlanningParts.empty()), Threads()
    hanging, released = threading.Semaphore(0), threading.Event()
    looks, tries = threading.Semaphore(0), threading.Semaphore(0)

    def hang() -> None:
        hanging.release()
        assert released.wait(60)

    maintenance = storage.maintenance
    monkeypatch.setattr(maintenance, "enforce_limit", lambda tier: {MEMORY: looks.release, SSD: hang}[tier]())
    monkeypatch.setattr(maintenance, "retry_tier", lambda tier: {MEMORY: tries.release, SSD: hang}[tier]())
    for step in ("enforce_quotas", "compact"):
        monkeypatch.setattr(maintenance, step, hang)

    def seen() -> bool:
        return all(each.acquire(timeout=30) for each in [*[hanging] * 4, *[looks, tries] * 20])

    async def scene() -> None:
        node = Node(config, storage, threads, ErrorLog())
        upkeep = asyncio.create_task(node.maintain())
        try:
            assert await asyncio.to_thread(seen)
        finally:
            released.set()
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            await node.stop()

    try:
        asyncio.run(scene())
    finally:
        threads.close()
        storage.close()


def test_the_status_of_a_server_is_taken_once_for_all_its_datasets() -> None:
    statuses: list[str] = []
    endpoints = [SimpleNamespace(status=functools.partial(statuses.append, name)) for name in ("one", "two")]
    datasets = [
        SimpleNamespace(
            origin=SimpleNamespace(endpoint=endpoints[number % 2]),
            record=SimpleNamespace(name=f"d{number}", snapshots=[SimpleNamespace(id=f"s{number}")]),
        )
        for number in range(6)
    ]
    reads = SimpleNamespace(waiting_reads=lambda since: [], failures=SimpleNamespace(latest_first=list))
    examination = NodeExamination(cast(Any, datasets), cast(Any, reads), ErrorLog(), NO_CLUSTER.away_nodes)

    async def find() -> TroubleInputs:
        return examination.examine()

    found = asyncio.run(find())
    assert statuses == ["one", "two"]
    assert [one.snapshots for one in found.servers] == [["s0", "s2", "s4"], ["s1", "s3", "s5"]]
