"""What the store does when the machine has less room than its budgets: who gives way, in what order, and what goes on
meanwhile."""

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachefs.block import MEMORY, SSD
from cachefs.errors import StoreFull
from cachefs.planning.eviction import tiering
from cachefs.planning.eviction.quotas import Quota
from cachefs_daemon.store import capacity, maintenance, segment_writer, transfers
from cachefs_daemon.store.segment_writer import span
from tests.blockstore import (
    BLOCK_SIZE,
    OpenStore,
    data_of,
    disk_usage,
    fill,
    key_of,
    opened,
    readable,
    store_config,
)
from tests.simulated import space_of

MIB = 1 << 20


def squeeze(store: OpenStore, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """From now on the machine has *room* bytes for the memory tier."""
    used = store.usage()[MEMORY].used
    monkeypatch.setattr(capacity, "memory_room", lambda **_: room - used)
    store.keep_limits()
    monkeypatch.setattr(capacity, "memory_room", lambda **_: room - store.usage()[MEMORY].used)


def publish(store: OpenStore) -> None:
    """A job publishes that reads none of the blocks of `fill`."""
    store.plan.add_space(space_of([1000] * 10))
    store.plan.set_epoch("job", "space", 0, np.arange(10), is_last=True)


@pytest.mark.parametrize("policy", ["minio", "lru", "clairvoyant"])
@pytest.mark.parametrize("published", [False, True])
def test_a_limit_that_sinks_costs_unpinned_blocks_first(
    root: Path, monkeypatch: pytest.MonkeyPatch, policy: str, published: bool
) -> None:
    with opened(store_config(root, memory=16 * MIB, ssd=0, policy=policy)) as store:
        fill(store, range(3500), 1000)
        pinned = range(0, 500)
        store.pin(key_of(number) for number in pinned)
        if published:
            publish(store)
        squeeze(store, monkeypatch, 6 * MIB)
        assert store.usage()[MEMORY].used <= 6 * MIB
        assert store.usage()[MEMORY].blocks > len(pinned)
        assert readable(store, pinned, 1000) == set(pinned)
        squeeze(store, monkeypatch, 1 * MIB)
        assert store.usage()[MEMORY].used <= 1 * MIB, "a limit is physical"
        assert 0 < store.usage()[MEMORY].blocks < len(pinned)


@pytest.mark.parametrize("policy", ["minio", "clairvoyant"])
def test_a_squeezed_tier_that_never_evicts_keeps_room_for_what_passes(
    root: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    with opened(store_config(root, memory=8 * MIB, ssd=0, policy=policy)) as store:
        fill(store, range(100))
        squeeze(store, monkeypatch, 4 * MIB)
        kept = store.keys()
        assert len(kept) >= 15
        for number in range(200, 260):
            assert store.put(key_of(number), data_of(number)) is not None
        store.keep_limits()
        assert set(store.keys()) >= {key for key in kept if key in set(store.keys())}
        assert sum(store.get(key) is not None for key in kept) >= 15, "only what passes gives way for what passes"


@pytest.mark.parametrize("policy", ["minio", "lru", "clairvoyant"])
def test_without_any_memory_a_put_is_refused_at_once_or_goes_to_the_ssd(
    root: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    with opened(store_config(root, memory=4 * MIB, ssd=4 * MIB, policy=policy)) as store:
        fill(store, range(100))
        squeeze(store, monkeypatch, 0)
        assert store.usage()[MEMORY].used == 0
        if policy == "lru":
            location = store.put(key_of(200), data_of(200))
            assert location is not None
            assert location.tier == SSD
        else:
            monkeypatch.setattr(transfers, "_POLL_SECONDS", "not to be waited for")
            with pytest.raises(StoreFull, match="its limit of 0 bytes is in use"):
                store.put(key_of(200), data_of(200))


def full_at(limit: int, monkeypatch: pytest.MonkeyPatch, directory: Path, error: int = errno.ENOSPC) -> None:
    """From now on the file system of *directory* takes no more than *limit* bytes."""
    write = segment_writer.write_records

    def refuse(file: segment_writer.SegmentFile, records: Any, **options: Any) -> tuple[int, OSError | None]:
        for number, record in enumerate(records):
            taken = sum(entry.stat().st_blocks * 512 for entry in directory.iterdir())
            if file.path.parent == directory and taken + span(len(record[1])) > limit:
                return number, OSError(error, "it is full")
            done, failure = write(file, [record], **options)
            if not done:
                return number, failure
        return len(records), None

    monkeypatch.setattr(segment_writer, "write_records", refuse)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_where_the_file_system_is_full_blocks_give_way(root: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    with opened(store_config(root, memory=8 * MIB, ssd=0, policy="lru")) as store:
        fill(store, range(30))
        full_at(3 * MIB, monkeypatch, root / "memory", error)
        fill(store, range(30, 90))
        assert store.usage()[MEMORY].problem == ""
        assert 20 <= store.usage()[MEMORY].blocks <= 31
        assert readable(store, range(80, 90)) == set(range(80, 90))


def test_where_nothing_may_give_way_a_full_tier_says_so_until_it_has_shrunk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_config(root, memory=8 * MIB, ssd=0, policy="minio")) as store:
        fill(store, range(30))
        full_at(store.usage()[MEMORY].used, monkeypatch, root / "memory")
        with pytest.raises(StoreFull, match="it is full"):
            store.put(key_of(30), data_of(30))
        assert "it is full" in store.usage()[MEMORY].problem
        # What `statvfs` says of this file system does not show that it is full.
        monkeypatch.setattr(capacity, "disk_room", lambda *_: 0)
        store.maintain()
        assert store.put(key_of(30), data_of(30)) is not None


def test_limits_are_kept_while_a_compaction_hangs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, released = threading.Event(), threading.Event()
    survey = segment_writer.survey

    def hang(path: Path) -> Any:
        if threading.current_thread() is compaction:
            hanging.set()
            assert released.wait(60)
        return survey(path)

    with opened(store_config(root, memory=16 * MIB, ssd=0)) as store:
        fill(store, range(100))
        store.evict([key_of(number) for number in range(100) if number % 10])
        monkeypatch.setattr(segment_writer, "survey", hang)
        compaction = threading.Thread(target=store.storage.maintenance.compact)
        compaction.start()
        try:
            assert hanging.wait(60)
            squeeze(store, monkeypatch, 500_000)
            assert store.usage()[MEMORY].used <= 500_000
        finally:
            released.set()
            compaction.join()
        assert readable(store, range(100)) == {number for number in range(100) if store.get(key_of(number))}


@contextmanager
def hanging_ssd(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Iterator[threading.Event]:
    """Calls of this function that concern the SSD tier hang until the end; the event is set once one does. The first
    argument says which tier it is."""
    hanging, released = threading.Event(), threading.Event()
    call = getattr(module, name)

    def hang(which: Any, *rest: Any, **options: Any) -> Any:
        path = (
            which.root if isinstance(which, segment_writer.SegmentFile) else Path(f"/proc/self/fd/{which}").readlink()
        )
        if path.name == "ssd":
            hanging.set()
            assert released.wait(60)
        return call(which, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, hang)
        try:
            yield hanging
        finally:
            released.set()


@pytest.mark.parametrize(("module", "name"), [(capacity, "disk_room"), (segment_writer, "punch")])
def test_the_limit_of_memory_is_kept_while_that_of_a_disk_hangs(
    root: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    with opened(store_config(root, memory=4 * MIB, ssd=8 * MIB, policy="lru")) as store:
        fill(store, range(100))
        disk_room = capacity.disk_room
        monkeypatch.setattr(capacity, "disk_room", lambda *which: min(disk_room(*which), -2 * MIB))
        with hanging_ssd(monkeypatch, module, name) as hanging:
            looking = threading.Thread(target=store.storage.maintenance.enforce_limit, args=(SSD,))
            looking.start()
            assert hanging.wait(60)
            monkeypatch.setattr(capacity, "memory_room", lambda **_: -2 * MIB)
            store.storage.maintenance.enforce_limit(MEMORY)
            assert store.usage()[MEMORY].used <= 2 * MIB
        looking.join(60)
        assert store.usage()[SSD].used <= 6 * MIB


def test_a_squeeze_does_not_wait_for_a_disk_that_hangs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_DEMOTION_TIMEOUT", 0.1)
    with opened(store_config(root, memory=8 * MIB, ssd=64 * MIB, policy="lru")) as store:
        fill(store, range(70))
        before = len(store.keys())
        with hanging_ssd(monkeypatch, segment_writer, "write_records") as hanging:
            squeeze(store, monkeypatch, 2 * MIB)
            assert hanging.is_set()
            assert store.usage()[MEMORY].used <= 2 * MIB
            assert "longer than" in store.usage()[SSD].problem
        store.storage.maintenance.close()
        store.maintain()
        usage = store.usage()
        assert len(store.keys()) < before
        assert readable(store, range(70)) == {number for number in range(70) if store.get(key_of(number))}
        assert [tier.problem for tier in usage] == ["", ""]
        assert all(disk_usage(tier.directory) <= tier.used + 4096 for tier in usage), "what was given up is freed"


def test_a_squeeze_moves_blocks_down_as_long_as_there_is_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(store_config(root, memory=8 * MIB, ssd=64 * MIB, policy="lru")) as store:
        fill(store, range(70))
        squeeze(store, monkeypatch, 6 * MIB)
        assert readable(store, range(70)) == set(range(70))
        monkeypatch.setattr(maintenance, "DEMOTION_SECONDS", 0)
        squeeze(store, monkeypatch, 2 * MIB)
        assert len(readable(store, range(70))) < 60


def test_a_compaction_ends_in_time_and_goes_on_with_the_next_call(root: Path) -> None:
    with opened(store_config(root, memory=16 * MIB)) as store:
        fill(store, range(150))
        kept = [number for number in range(150) if number % 10 == 0]
        store.evict([key_of(number) for number in range(150) if number % 10])
        before = calls = store.usage()[MEMORY].segments
        while store.usage()[MEMORY].segments > 2:
            store.storage.maintenance.compact(seconds=0)
            assert store.usage()[MEMORY].segments >= before - 1
            before = store.usage()[MEMORY].segments
            calls -= 1
            assert calls > -100
        assert readable(store, range(150)) == set(kept)


def test_overdue_blocks_that_are_awaited_are_looked_at_in_portions(root: Path) -> None:
    """A million of them at once took 2 s under the store's lock."""
    with opened(store_config(root, memory=16 * MIB, ssd=0, policy="clairvoyant")) as store:
        space = space_of([1000] * 3000, block_size=BLOCK_SIZE)
        keys = space.keys(np.arange(space.count))
        for key in keys:
            store.put(key, bytes(1000), transient=False, snapshot="space")
        store.plan.add_space(space)
        store.plan.set_epoch("job", "space", 0, np.arange(space.count), is_last=True)
        store.set_limit(Quota("d", frozenset(["space"]), ttl=5.0))
        store.claim(keys, "space")
        late = time.monotonic() + 10
        with store.tiering as decisions:
            portions = 0
            while (found := decisions.choose_expired(late)) is not None:
                assert not found
                portions += 1
            assert portions > 1
        store.maintain()
        assert len(store.keys()) == len(keys)


def test_the_end_of_the_last_job_is_followed_in_portions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the tier becomes room for what passes; in one hold of the lock it took 0.5 s for 200,000 blocks."""
    monkeypatch.setattr(tiering, "_BLOCKS_AT_ONCE", 64)
    with opened(store_config(root, memory=32 * MIB, ssd=0, policy="clairvoyant")) as store:
        space = space_of([1000] * 8000, block_size=BLOCK_SIZE)
        keys = space.keys(np.arange(space.count))
        store.plan.add_space(space)
        store.plan.set_epoch("job", "space", 0, np.arange(space.count))
        for key in keys:
            store.put(key, bytes(1000), transient=False)
        full = store.usage()[MEMORY].blocks
        store.plan.remove_consumer("job")
        store.put(key_of(0), data_of(0))
        with store.tiering as decisions:
            moved = 0
            while decisions.catch_up(store.storage._tiers[MEMORY]):
                moved += 1
            assert moved > 1
        fill(store, range(1, 100))
        assert full > store.usage()[MEMORY].blocks > 0.8 * full
