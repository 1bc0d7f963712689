"""The block store against a model, and its promises one by one."""

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachefs.block import MEMORY, SSD, BlockLocation
from cachefs.errors import CachefsError, ConfigError, StoreFull
from cachefs.index import IndexReader
from cachefs.segment import segment_path
from cachefs_daemon.store import batch_io
from cachefs_daemon.store import segment_writer as segment_module
from cachefs_daemon.store import tier as tier_module
from cachefs_daemon.store.segment_writer import PAGE, SegmentFile, span
from cachefs_daemon.store.storage import StoreConfig
from tests.blockstore import (
    BLOCK_SIZE,
    OpenStore,
    StoreProcess,
    data_of,
    disk_usage,
    fill,
    key_of,
    opened,
    readable,
    store_config,
)


def size_of(number: int) -> int:
    """A size that follows from the number: small, many pieces, or a whole block."""
    return (1, 4000, 130_000, BLOCK_SIZE)[number % 4]


NUMBERS = st.integers(0, 60)
MANY = st.lists(NUMBERS, max_size=20)


class StoreModel(RuleBasedStateMachine):
    """Whatever is put, evicted, compacted and however often the process dies: like a dict with a budget."""

    @initialize(policy=st.sampled_from(["minio", "lru", "clairvoyant"]), ssd=st.sampled_from([0, 6 << 20]))
    def start(self, policy: str, ssd: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="cachefs-test-"))
        self.config = store_config(self.root, memory=3 << 20, ssd=ssd, policy=policy, segment=BLOCK_SIZE * 3)
        self.process = StoreProcess(self.config)
        # What must be there, as no budget was ever near; None once some block may have had to give way.
        self.certain: set[int] | None = set()

    @rule(number=NUMBERS, transient=st.booleans())
    def put(self, number: int, transient: bool) -> None:
        key, data = key_of(number), data_of(number, size_of(number))
        location = self.process.call("put", key, data, transient=transient)
        assert location is not None or not transient
        if location is not None:
            assert self.process.call("read", key, location) == data
            assert self.process.call("get", key) == location
            if self.certain is not None:
                self.certain.add(number)
        if self.used() > 1 << 20:
            self.certain = None

    @rule(numbers=MANY)
    def put_together(self, numbers: list[int]) -> None:
        blocks = {key_of(number): data_of(number, size_of(number)) for number in numbers}
        for key, location in zip(blocks, self.process.call("put_together", [*blocks.items()]), strict=True):
            assert location is not None
            # Others of the batch may have taken its place.
            assert self.process.call("get", key) != location or self.process.call("read", key, location) == blocks[key]
        if self.used() > 1 << 20:
            self.certain = None
        elif self.certain is not None:
            self.certain.update(numbers)

    @rule(numbers=MANY)
    def get(self, numbers: list[int]) -> None:
        for number in numbers:
            location = self.process.call("get", key_of(number))
            if location is not None:
                assert self.process.call("read", key_of(number), location) == data_of(number, size_of(number))
            assert self.certain is None or (number in self.certain) == (location is not None)

    @rule(numbers=MANY)
    def evict(self, numbers: list[int]) -> None:
        there = {number for number in numbers if self.process.call("get", key_of(number)) is not None}
        blocks, freed = self.process.call("evict", [key_of(number) for number in numbers])
        assert (blocks, freed) == (len(there), sum(map(size_of, there)))
        assert all(self.process.call("get", key_of(number)) is None for number in numbers)
        if self.certain is not None:
            self.certain -= set(numbers)

    @rule(numbers=MANY)
    def use(self, numbers: list[int]) -> None:
        self.process.call("accessed", [key_of(number) for number in numbers])

    @rule(numbers=MANY, pin=st.booleans())
    def pin(self, numbers: list[int], pin: bool) -> None:
        self.process.call("pin" if pin else "unpin", [key_of(number) for number in numbers])

    @rule()
    def compact(self) -> None:
        before = set(self.process.call("keys"))
        self.process.call("maintain")
        assert set(self.process.call("keys")) <= before
        if self.config.memory.policy == "minio":
            assert set(self.process.call("keys")) == before

    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        before = sorted(self.process.call("keys"))
        if kill:
            self.process.kill9()
        else:
            self.process.stop()
        self.process = StoreProcess(self.config)
        assert sorted(self.process.call("keys")) == before

    @precondition(lambda self: hasattr(self, "process"))
    @invariant()
    def within_budget(self) -> None:
        for usage in self.process.call("usage"):
            assert disk_usage(usage.directory) <= usage.budget
            assert usage.used <= usage.limit
            assert not usage.problem
        assert sum(usage.blocks for usage in self.process.call("usage")) == len(self.process.call("keys"))

    def used(self) -> int:
        return sum(usage.used for usage in self.process.call("usage"))

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self.process.stop()
            shutil.rmtree(self.root)


StoreModel.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStoreModel = StoreModel.TestCase


def test_a_put_block_is_soon_seen_by_other_processes_and_an_evicted_one_is_gone(root: Path) -> None:
    process = StoreProcess(store_config(root))
    reader = IndexReader(root / "state/index-1.lmdb")
    try:
        location = process.call("put", key_of(1), data_of(1))
        waited = threading.Event()
        for _ in range(1000):
            if reader.get(key_of(1)) == location:
                break
            waited.wait(0.01)
        assert reader.get(key_of(1)) == location
        process.call("evict", [key_of(1)])
        assert reader.get(key_of(1)) is None
    finally:
        reader.close()
        process.stop()


def test_an_index_that_is_not_there_is_an_error_of_ours(root: Path) -> None:
    with pytest.raises(CachefsError, match=r"index .*/nothing\.lmdb cannot be read"):
        IndexReader(root / "nothing.lmdb")


def test_the_second_put_answers_with_the_first_place(root: Path) -> None:
    with opened(store_config(root)) as store:
        first = store.put(key_of(1), data_of(1))
        assert store.put(key_of(1), bytearray(data_of(1))) == first
        assert store.usage()[0].blocks == 1


def test_concurrent_puts_of_one_block_leave_one_copy(root: Path) -> None:
    with opened(store_config(root)) as store:
        start = threading.Barrier(8)
        places: list[BlockLocation | None] = []

        def put() -> None:
            start.wait(60)
            places.append(store.put(key_of(1), data_of(1)))

        threads = [threading.Thread(target=put) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(set(places)) == 1
        assert store.usage()[0].used == span(100_000) + PAGE


def test_memory_fills_first_then_ssd_then_blocks_only_pass(root: Path) -> None:
    with opened(store_config(root, memory=2 << 20, ssd=1 << 20, segment=256 << 10)) as store:
        tiers, number = list[int](), 0
        while (location := store.put(key_of(number), data_of(number), transient=False)) is not None:
            tiers.append(location.tier)
            number += 1
        assert tiers == sorted(tiers)
        assert set(tiers) == {MEMORY, SSD}
        passing = range(number, number + 30)
        for number in passing:
            location = store.put(key_of(number), data_of(number))
            assert location is not None
            assert location.tier == MEMORY
            assert store.read(key_of(number), location) == data_of(number)
        assert readable(store, range(len(tiers))) == set(range(len(tiers))), (
            "an admitted block gave way to a passing one"
        )
        kept = readable(store, passing)
        assert kept == set(passing[-len(kept) :]), "passing blocks leave first in, first out"
        assert len(kept) * span(100_000) <= 4 * span(BLOCK_SIZE)


def test_what_lru_memory_gives_up_moves_to_the_ssd_tier(root: Path) -> None:
    with opened(store_config(root, memory=2 << 20, ssd=8 << 20, policy="lru")) as store:
        fill(store, range(40))
        location = store.get(key_of(0))
        assert location is not None
        assert location.tier == SSD
        assert readable(store, range(40)) == set(range(40))
        memory, ssd = store.usage()
        assert memory.evicted == ssd.blocks > 0


def test_use_in_the_ssd_tier_keeps_a_block_there(root: Path) -> None:
    with opened(store_config(root, memory=2 << 20, ssd=2 << 20, policy="lru")) as store:
        for number in range(80):
            fill(store, range(number, number + 1))
            store.accessed([key_of(0), key_of(1)])
        assert readable(store, range(2)) == {0, 1}
        assert len(readable(store, range(80))) < 60


def test_lru_tiers_are_one_list(root: Path) -> None:
    """Every block that was read among the last so many different ones is there, and nothing else."""
    with opened(store_config(root, memory=2 << 20, ssd=2 << 20, policy="lru")) as store:
        fill(store, range(100))
        capacity = len(readable(store, range(100)))
        order, draw = [number for number in range(100) if store.get(key_of(number))], random.Random(1)
        for number in draw.choices(range(100), k=1000):
            assert (store.get(key_of(number)) is not None) == (number in order)
            if number in order:
                store.accessed([key_of(number)])
                order.remove(number)
            else:
                fill(store, range(number, number + 1))
            order = [*order, number][-capacity:]


def test_lru_tiers_are_one_list_after_a_restart_too(root: Path) -> None:
    """What was in memory was used later than what was in the SSD tier: it does not leave the node before that."""
    config = store_config(root, memory=2 << 20, ssd=4 << 20, policy="lru")
    with opened(config) as store:
        fill(store, range(100))
        in_memory = [number for number in range(100) if _tier(store, number) == MEMORY]
        in_ssd = [number for number in range(100) if _tier(store, number) == SSD]
    with opened(config) as store:
        fill(store, range(100, 100 + len(in_memory)))
        assert {_tier(store, number) for number in in_memory} == {SSD}
        assert len(readable(store, range(in_ssd[0], in_ssd[-1] + 1))) < len(in_ssd)


def _tier(store: OpenStore, number: int) -> int | None:
    location = store.get(key_of(number))
    return location.tier if location is not None else None


def test_pinned_blocks_stay_but_a_reader_is_served_all_the_same(root: Path) -> None:
    with opened(store_config(root, memory=2 << 20, ssd=0, policy="lru")) as store:
        store.pin([key_of(number) for number in range(5)])
        fill(store, range(50))
        assert readable(store, range(5)) == set(range(5))
        store.pin([key_of(number) for number in range(50)])
        assert store.put(key_of(50), data_of(50), transient=False) is None
        assert store.put(key_of(50), data_of(50)) is not None


def test_store_full_names_the_tier(root: Path) -> None:
    with (
        opened(store_config(root, memory=1 << 20, ssd=0)) as store,
        pytest.raises(StoreFull, match="memory tier cannot take a block of 2097152 bytes"),
    ):
        store.put(key_of(1), bytes(2 << 20))


def test_sparse_segments_are_copied_forward_and_unlinked(root: Path) -> None:
    with opened(store_config(root, memory=16 << 20, segment=1 << 20)) as store:
        fill(store, range(100))
        kept = range(0, 100, 10)
        store.evict([key_of(number) for number in range(100) if number not in kept])
        before = store.usage()[0]
        store.maintain()
        after = store.usage()[0]
        assert readable(store, range(100)) == set(kept)
        assert after.segments <= 2 < before.segments
        assert len(list(after.directory.glob("*.seg"))) == after.segments
        assert after.blocks == before.blocks == len(kept)


def test_a_deleted_segment_does_not_stop_the_others_from_being_compacted(root: Path) -> None:
    with opened(store_config(root, memory=16 << 20, segment=1 << 20)) as store:
        fill(store, range(100))
        deleted = store.get(key_of(0))
        assert deleted is not None
        segment_path(root / "memory", deleted.segment).unlink()
        kept = range(0, 100, 10)
        store.evict([key_of(number) for number in range(100) if number not in kept])
        store.maintain()
        usage = store.usage()[0]
        assert usage.segments <= 2
        assert usage.used >= disk_usage(usage.directory) - PAGE
        assert readable(store, range(100)) == set(kept) - {0}


def test_a_block_that_is_moved_while_it_is_given_up_goes_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_config(root, policy="lru")) as store:
        fill(store, range(30))
        first = store.get(key_of(0))
        assert first is not None
        neighbours = [key_of(n) for n in range(1, 30) if (at := store.get(key_of(n))) and at.segment == first.segment]
        store.evict(neighbours)
        read, moved = segment_module.read_into, threading.Event()

        def compact_first(directory: int, blocks: Sequence[tuple[bytes, BlockLocation, memoryview]]) -> list[bool]:
            if key_of(0) in [key for key, _, _ in blocks] and not moved.is_set():
                moved.set()
                store.maintain()
            return read(directory, blocks)

        monkeypatch.setattr(segment_module, "read_into", compact_first)
        number = 100
        while not moved.is_set():
            fill(store, range(number, number + 1))
            number += 1
        location = store.get(key_of(0))
        assert location is not None
        assert location.tier == SSD


def test_a_damaged_block_is_not_moved_and_its_room_is_given_back(root: Path) -> None:
    with opened(store_config(root, policy="lru")) as store:
        fill(store, range(30))
        damaged = store.get(key_of(0))
        assert damaged is not None
        with segment_path(root / "memory", damaged.segment).open("r+b") as segment:
            segment.seek(damaged.offset)
            segment.write(b"wrong")
        fill(store, range(100, 140))
        assert store.get(key_of(0)) is None
        here = store.keys()
        below = [place for key in here if (place := store.get(key)) and place.tier == SSD]
        assert below
        usage = store.usage()[SSD]
        assert usage.used == sum(span(place.length) for place in below) + PAGE * usage.segments


def test_what_the_ssd_would_not_take_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = store_config(root)
    config = replace(config, memory=replace(config.memory, policy="lru"))  # and what comes into the SSD tier stays
    with opened(config) as store:
        fill(store, range(300))
        evicted = store.usage()[MEMORY].evicted
        monkeypatch.setattr(segment_module, "read_into", None)
        fill(store, range(300, 320))
        assert store.usage()[MEMORY].evicted >= evicted + 20


def test_holes_that_touch_are_punched_as_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    punched: list[int] = []
    punch_many = batch_io.punch_many

    def punch(directory: int, flags: int, spans: Sequence[batch_io.Span]) -> list[int]:
        punched.extend(length for _, _, length in spans)
        return punch_many(directory, flags, spans)

    with opened(store_config(root)) as store:
        fill(store, range(7))
        monkeypatch.setattr(batch_io, "punch_many", punch)
        store.evict([key_of(number) for number in (5, 1, 3, 0, 2)])
        assert sorted(punched) == [span(100_000), 4 * span(100_000)]


@pytest.mark.parametrize("policy", ["minio", "lru"])
def test_budgets_hold_at_every_moment_of_concurrent_use(root: Path, tmp_path: Path, policy: str) -> None:
    config = store_config(root, memory=4 << 20, policy=policy)
    # Not on tmpfs: a disk's file system adds its own to what `du` counts.
    config = replace(config, ssd=replace(config.ssd, directory=tmp_path / "ssd"))
    with opened(config) as store:

        def churn(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(300):
                number = draw.randrange(400)
                fill(store, range(number, number + 1))
                if number % 8 == 0:
                    store.evict([key_of(draw.randrange(400))])
                    store.maintain()

        samples = 0
        with ThreadPoolExecutor() as pool:
            churning = [pool.submit(churn, seed) for seed in range(4)]
            while not all(thread.done() for thread in churning):
                for usage in store.usage():
                    # A block that moves between two files while they are being counted is counted twice.
                    assert disk_usage(usage.directory) <= usage.budget + config.memory.segment_size
                samples += 1
        for thread in churning:
            thread.result()
        assert samples > 3
        assert len(readable(store, range(400))) == len(store.keys())
        for usage in store.usage():
            assert disk_usage(usage.directory) <= usage.budget


def test_a_lowered_budget_is_kept_from_the_start(root: Path) -> None:
    config = store_config(root)
    with opened(config) as store:
        fill(store, range(100))
    smaller = replace(config, memory=replace(config.memory, budget=2 << 20), ssd=replace(config.ssd, budget=4 << 20))
    with opened(smaller) as store:
        for usage in store.usage():
            assert disk_usage(usage.directory) <= usage.budget
            assert usage.blocks > 0
        assert len(readable(store, range(100))) == sum(usage.blocks for usage in store.usage())


def test_without_its_ssd_tier_a_store_forgets_what_was_there(root: Path) -> None:
    with opened(store_config(root, memory=2 << 20)) as store:
        fill(store, range(100))
        held = store.usage()[0].blocks
    with opened(store_config(root, memory=2 << 20, ssd=0)) as store:
        assert len(store.keys()) == held
        assert len(store.usage()) == 1


def test_blocks_of_a_content_come_in_order(root: Path) -> None:
    content = b"c" * 16
    with opened(store_config(root)) as store:
        keys = [content + number.to_bytes(4, "big") for number in (2, 0, 1)]
        for key in keys:
            store.put(key, b"x")
        store.put(b"d" * 20, b"x")
        assert [key for key, _ in store.blocks_of(content)] == sorted(keys)
        store.evict(keys[:1])
        assert [key for key, _ in store.blocks_of(content)] == sorted(keys[1:])


def test_a_hanging_ssd_keeps_nobody_from_the_memory_tier(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, hanging = threading.Event(), threading.Semaphore(0)
    write = segment_module.write_records

    def hang_on_ssd(file: SegmentFile, *rest: Any, **options: Any) -> tuple[int, OSError | None]:
        if file.root.name == "ssd":
            hanging.release()
            assert released.wait(60)
        return write(file, *rest, **options)

    monkeypatch.setattr(tier_module, "_WRITE_TIMEOUT", 0.05)
    with opened(store_config(root, memory=3 << 20, ssd=8 << 20)) as store:
        held = 0
        while (location := store.put(key_of(held), data_of(held))) is not None and location.tier == MEMORY:
            held += 1
        monkeypatch.setattr(segment_module, "write_records", hang_on_ssd)
        stuck = [threading.Thread(target=fill, args=(store, range(number, number + 1))) for number in range(100, 104)]
        for thread in stuck:
            thread.start()
        try:
            assert all(hanging.acquire(timeout=60) for _ in stuck)
            location = store.put(key_of(200), data_of(200))
            assert location is not None
            assert location.tier == MEMORY
            assert store.read(key_of(200), location) == data_of(200)
            assert "writes take longer" in store.usage()[1].problem
            assert store.evict([key_of(0)]) == (1, 100_000)
            assert store.put(key_of(0), data_of(0)) is not None
            assert readable(store, range(held)) == set(range(held))
        finally:
            released.set()
            for thread in stuck:
                thread.join(60)
        assert readable(store, range(100, 104)) == set(range(100, 104))


def test_who_gives_up_a_hanging_ssd_waits_for_no_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index may be on the disk that hangs. Its entry still goes before the bytes do."""
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                order.append(name)
            return call(*args)

        return note

    with opened(store_config(root, memory=1 << 20, ssd=8 << 20)) as store:
        fill(store, range(40))
        places = {key_of(number): store.get(key_of(number)) for number in range(40)}
        key, location = next((key, at) for key, at in places.items() if at is not None and at.tier == SSD)
        monkeypatch.setattr(store.index, "commit", noted("commit", store.index.commit))
        monkeypatch.setattr(segment_module, "punch", noted("punch", segment_module.punch))
        assert store.blocks.drop_unresponsive(key, location)
        assert order == []
        assert store.get(key) is None
        assert not store.blocks.drop_unresponsive(key, location)
        store.retry()
        assert order == ["commit", "commit", "punch"]
        assert store.usage()[SSD].problem == ""
    with opened(store_config(root, memory=1 << 20, ssd=8 << 20)) as store:
        assert store.get(key) is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"budget": BLOCK_SIZE}, "budget is 262144 bytes, less than one block"),
        ({"budget": 1 << 60}, "file system behind .* has only"),
        ({"directory": Path("/proc/nothing")}, "dir /proc/nothing cannot be used"),
        ({"policy": "magic"}, "policy 'magic' does not exist"),
    ],
)
def test_settings_that_cannot_do_are_refused(root: Path, change: dict[str, object], names: str) -> None:
    config = store_config(root)
    with pytest.raises(ConfigError, match=names):
        OpenStore(replace(config, memory=replace(config.memory, **change)))
    OpenStore(config).close()


def test_the_smallest_budget_named_in_the_error_works(root: Path) -> None:
    config: StoreConfig = store_config(root, memory=PAGE, ssd=0)
    with pytest.raises(ConfigError) as refused:
        OpenStore(config)
    smallest = int(str(refused.value).partition("at least ")[2].split()[0])
    with opened(store_config(root, memory=smallest, ssd=0)) as store:
        for number in range(5):
            assert store.put(key_of(number), data_of(number, BLOCK_SIZE)) is not None
        assert disk_usage(root / "memory") <= smallest


def test_a_torn_record_is_not_adopted(root: Path) -> None:
    with opened(store_config(root)) as store:
        location = store.put(key_of(1), data_of(1))
        assert location is not None
        path = segment_path(root / "memory", location.segment)
    os.truncate(path, 50_000)
    with opened(store_config(root)) as store:
        assert store.keys() == []
        assert store.usage()[0].used == 0
        assert disk_usage(root / "memory") == 0
