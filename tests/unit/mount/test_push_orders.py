"""What becomes of an order: shared out, done in parts, reported once, and remembered."""

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.mount.push.blocks import StoreUnsupported
from cachefs.mount.push.command_tracker import CommandTracker, PushedBlocks
from cachefs.mount.push.mounted_snapshots import MountedSnapshot
from cachefs.mount.push.push_threads import PushTask, PushThreads, split_task
from cachefs.push_messages import StoredPages
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file

Block = tuple[int, int]
BLOCKS = st.tuples(st.integers(0, 5000), st.one_of(st.just(0), st.integers(0, 9)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> MountedSnapshot:
    directory = tmp_path_factory.mktemp("snapshot")
    path = build_snapshot_file([ListedObject(b"a", 1, 1, b"v")], "file:///one", 4 << 20, lambda key: key, directory)
    return MountedSnapshot(Snapshot(Path(path)), 7, b"/mnt/")


def task(place: MountedSnapshot, blocks: list[Block], serial: int = 1, *, drop: bool = False) -> PushTask:
    entries, numbers = np.array(blocks, "<u8").reshape(-1, 2).T
    return PushTask(serial, place, drop, np.arange(len(blocks)), entries, numbers.astype("<u4"))


def blocks_of(held: list[StoredPages]) -> set[Block]:
    found = [(np.frombuffer(one.entries, "<u8"), np.frombuffer(one.numbers, "<u4")) for one in held]
    return {block for entries, numbers in found for block in zip(entries.tolist(), numbers.tolist(), strict=True)}


@given(blocks=st.lists(BLOCKS), threads=st.integers(1, 5))
def test_every_block_goes_to_one_thread_and_always_to_the_same(
    place: MountedSnapshot, blocks: list[Block], threads: int
) -> None:
    parts = split_task(task(place, blocks), threads)
    thread_of: dict[Block, int] = {}
    indices = []
    for thread, part in parts.items():
        assert part.indices.tolist() == sorted(part.indices.tolist())
        indices += part.indices.tolist()
        for index, entry, number in zip(part.indices, part.entries, part.numbers, strict=True):
            block = (int(entry), int(number))
            assert blocks[index] == block
            assert thread_of.setdefault(block, thread) == thread
    assert sorted(indices) == list(range(len(blocks)))


def test_blocks_of_one_large_file_are_shared_out(place: MountedSnapshot) -> None:
    assert len(split_task(task(place, [(5, number) for number in range(8)]), 4)) == 4


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["s", "t"]), st.lists(BLOCKS, unique=True, max_size=20))))
def test_what_is_held_is_what_was_stored_and_not_dropped(steps: list[tuple[bool, str, list[Block]]]) -> None:
    held = PushedBlocks()
    expected: dict[str, set[Block]] = {"s": set(), "t": set()}
    for dropped, snapshot, blocks in steps:
        entries, numbers = np.array(blocks, "<u8").reshape(-1, 2).T
        held.record_blocks(snapshot, entries, numbers.astype("<u4"), dropped=dropped)
        expected[snapshot] = expected[snapshot] - set(blocks) if dropped else expected[snapshot] | set(blocks)
    found = {name: set(zip(entries.tolist(), numbers.tolist(), strict=True)) for name, entries, numbers in held}
    assert found == {name: blocks for name, blocks in expected.items() if blocks}


def test_snapshots_of_which_nothing_is_held_take_no_memory() -> None:
    held = PushedBlocks()
    entries = np.array([1, 2, 3], "<u8")
    for number in range(20):
        for dropped in (False, True):
            held.record_blocks(f"{number}", entries, np.array([0, 0, 7], "<u4"), dropped=dropped)
    assert list(held) == []
    assert len(held._first) <= 1
    assert len(held._later) <= 1


def test_an_order_is_done_when_all_its_parts_are(place: MountedSnapshot) -> None:
    ledger = CommandTracker()
    whole = task(place, [(4, 0), (5, 0), (6, 0), (7, 3)])
    parts = split_task(whole, 2)
    ledger.begin_command(whole, len(parts))
    ledger.finish_part(parts[1], [1])
    assert ledger.take_finished(0)[1] == []
    ledger.finish_part(parts[0], [2])
    (done,) = ledger.take_finished(0)[1]
    assert done.serial == 1
    assert np.frombuffer(done.failed, "<u4").tolist() == [1, 2]
    assert ledger.take_finished(0)[1] == []
    assert blocks_of(ledger.begin_subscription()) == {(4, 0), (7, 3)}


def test_an_order_for_nobody_fails_as_a_whole() -> None:
    ledger = CommandTracker()
    ledger.refuse_command(3, 2)
    (done,) = ledger.take_finished(0)[1]
    assert (done.serial, np.frombuffer(done.failed, "<u4").tolist()) == (3, [0, 1])


def test_a_new_subscription_waits_for_the_work_of_the_old_and_is_not_told_of_its_orders(place: MountedSnapshot) -> None:
    ledger = CommandTracker()
    first = ledger.take_finished(0)[0]
    whole = task(place, [(4, 0)])
    ledger.begin_command(whole, 1)
    answers: list[list[StoredPages]] = []
    settling = threading.Thread(target=lambda: answers.append(ledger.begin_subscription()))
    settling.start()
    settling.join(0.05)
    assert not answers
    ledger.finish_part(whole, [])
    settling.join(60)
    assert blocks_of(answers[0]) == {(4, 0)}
    subscription, done = ledger.take_finished(0)
    assert subscription != first
    assert done == []


class Kernel:
    """A mover whose kernel has all pages but those of block 3, and takes none."""

    def __init__(self) -> None:
        self.stores: list[tuple[int, bool]] = []

    def forget_unlinked(self) -> None:
        """It has no segments."""

    def move_block(
        self, place: MountedSnapshot, entry: int, number: int, *, drop: bool, check: bool, stores: bool
    ) -> bool:
        self.stores.append((number, stores))
        if number == 3 and stores:
            raise StoreUnsupported("Invalid argument")
        return number != 3


def test_a_block_that_the_kernel_does_not_take_is_the_only_one_of_its_check_that_fails(place: MountedSnapshot) -> None:
    kernel: Any = Kernel()
    reports: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    reasons: list[StoreUnsupported] = []
    workers = PushThreads([kernel], lambda task, failed: reports.put(failed), reasons.append, lambda: not reasons)
    blocks = task(place, [(1, number) for number in range(6)])
    for _ in range(2):
        workers.submit_tasks(split_task(blocks, 1))
        assert reports.get(timeout=60) == [3]
    assert len(reasons) == 1
    # From then on pages are looked for, and nothing is stored.
    assert kernel.stores[3:5] == [(3, True), (4, False)]
