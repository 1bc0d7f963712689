"""What mounts and jobs of other nodes read is kept here, and brought where it is missing, within bounds."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from cachefs.block import CONTENT_ID_SIZE, block_key
from cachefs.errors import Busy, NotFound
from cachefs.messages import BlockRef, OriginOptions, RemoteMount
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_cluster.directory import shared_datasets, used_snapshots
from cachefs_cluster.directory.shared_datasets import SharedDatasets
from cachefs_cluster.directory.used_snapshots import LocalDatasets, UsedSnapshots
from cachefs_cluster.sharing.sections import DATASETS, USED
from cachefs_cluster.sharing.snapshot_files import SnapshotFiles
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.datasets import records
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.datasets.stamps import UNSHARED, ChangeStamp, SharedChanges, StampClock, UnsharedChanges
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.ports import LocalDirectory, LocalRead
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.blockstore import BLOCK_SIZE, OpenStore, opened, store_config
from tests.sharing import SharingNode, introduce, node_record
from tests.waiting import until_async

NAME = "set"
ADDED = [ChangeStamp(1, f"{1:016x}", 1)]


def snapshots(root: Path, count: int) -> list[str]:
    """Ids of so many snapshots of the dataset, the oldest first; their files are there."""
    listed = [ListedObject(b"%02d" % number, 1000, 1, b"v") for number in range(10 + count)]
    url = f"file://{root}"
    paths = [
        build_snapshot_file(listed[: 10 + one], url, BLOCK_SIZE, lambda key: b"file:" + key, root)
        for one in range(count)
    ]
    return [path.stem for path in paths]


@dataclass
class Node:
    """One node of a cluster, without mounts and jobs: the test says what is read."""

    store: OpenStore
    sharing: SharingNode
    catalog: Catalog
    held: OpenSnapshots
    used: UsedSnapshots
    errors: ErrorLog
    changes: DatasetChanges
    coming: set[str]  # snapshots that come as current ones
    reading: list[LocalRead] = field(default_factory=list)

    def has(self, snapshot: str) -> bool:
        return self.held.get(snapshot) is not None

    async def prune(self) -> None:
        await self.catalog.forget_unused(lambda one: self.used.is_used(one.id))


class Changes(UnsharedChanges):
    """Stamps the changes of a catalog, and passes them on to the datasets that the node shares."""

    def __init__(self, node: str) -> None:
        self._stamp: Callable[[], ChangeStamp] = StampClock(node).tick
        self._shared: SharedChanges = UNSHARED

    def follow(self, shared: SharedDatasets) -> None:
        self._stamp, self._shared = shared.stamp, shared

    def stamp(self) -> ChangeStamp:
        return self._stamp()

    def note_change(self, name: str) -> None:
        self._shared.note_change(name)

    def additions_elsewhere(self) -> Iterable[tuple[str, ChangeStamp]]:
        return self._shared.additions_elsewhere()

    def stamps_elsewhere(self, name: str) -> Iterable[ChangeStamp]:
        return self._shared.stamps_elsewhere(name)


class Readers(LocalDirectory):
    """The readers on other nodes, which are known later."""

    def __init__(self, used: Callable[[], UsedSnapshots]) -> None:
        self._used = used

    def keep_if_read(self, snapshot_id: str) -> bool:
        return self._used().keep_if_read(snapshot_id)


async def start(shared: SharedDatasets, node: "Node") -> None:
    changes = node.catalog.shared
    assert isinstance(changes, Changes)
    changes.follow(shared)
    await shared.start()


@dataclass
class Bench:
    """Nodes of one cluster, with one dataset."""

    root: Path
    stack: ExitStack
    threads: Threads
    nodes: list[Node] = field(default_factory=list)
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def catalog(self, state: Path, held: OpenSnapshots) -> Catalog:
        return Catalog(state, held, OriginSettings(), self.threads, Changes(f"{int(state.name):016x}"))

    def as_started_anew(self, number: int) -> Catalog:
        """What a daemon has that starts with a copy of a node's state directory."""
        state, copied = self.root / str(number), self.root / f"{len(list(self.root.iterdir()))}00"
        (copied / "snapshots").mkdir(parents=True)
        shutil.copy(state / records.FILE_NAME, copied)
        for path in (state / "snapshots").iterdir():
            shutil.copy(path, copied / "snapshots")
        return self.catalog(copied, OpenSnapshots(copied / "snapshots", BLOCK_SIZE))

    async def node(self, has: Sequence[str], block_size: int = BLOCK_SIZE) -> Node:
        """A node with these snapshots of the dataset, the current one first; without any it does not have the
        dataset."""
        number = len(self.nodes) + 1
        state = self.root / str(number)
        held = OpenSnapshots(state / "snapshots", block_size)
        for one in has:
            shutil.copy(self.root / f"{one}.snapshot", held.path(one))
        known = [SnapshotRecord(one) for one in has]
        record = DatasetRecord(NAME, f"file://{self.root}", OriginOptions(), known, added=ADDED)
        records.save(state, records.Registry([record] if has else []))
        store = self.stack.enter_context(opened(store_config(state)))
        catalog = self.catalog(state, held)
        pins = Pins(store.tiering, catalog, self.threads)
        quotas = DatasetQuotas(store.tiering, store.index, catalog, self.threads)
        sharing, errors, reading = SharingNode(node_record(number), self.threads), ErrorLog(), list[LocalRead]()
        find = lambda one: held.path(one) if held.get(one) is not None else None  # noqa: E731
        files = SnapshotFiles(sharing.shared, find, self.threads)
        coming = set[str]()
        changes = DatasetChanges(catalog, pins, quotas, store.storage, self.threads, Readers(lambda: used))
        here = LocalDatasets(catalog, held, changes, errors, lambda name: "", lambda: reading)
        used = UsedSnapshots(sharing.shared, files, here, coming.__contains__)
        await sharing.start()
        node = Node(store, sharing, catalog, held, used, errors, changes, coming, reading)
        self.nodes.append(node)
        introduce([one.sharing for one in self.nodes])
        used.start()
        self.running.append(asyncio.create_task(used.run()))
        return node

    async def close(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        for node in self.nodes:
            await node.sharing.shared.stop()
            await node.catalog.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_snapshots, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(used_snapshots, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(used_snapshots, "MIN_RETRY_PAUSE", 0.01)


def on_bench(root: Path, scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def play(bench: Bench) -> None:
        try:
            await asyncio.wait_for(scene(bench), 60)
        finally:
            await bench.close()

    with ExitStack() as stack:
        bench = Bench(root, stack, Threads())
        stack.callback(bench.threads.close)
        virtual_time.run(play(bench))


def mount(*read: str, stays: bool = True) -> LocalRead:
    return LocalRead(NAME, read, "/mnt", stays)


def test_what_another_node_reads_is_brought_and_kept_until_no_node_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _, newer, current = snapshots(tmp_path, 4)
    block = BlockRef(old, 3, 0)

    async def scene(bench: Bench) -> None:
        reader = await bench.node([current, newer, old])
        other = await bench.node([current, newer])
        with pytest.raises(NotFound):
            other.held.block_source(block)
        reader.reading.append(mount(old))
        await until_async(lambda: other.has(old) and not other.used.is_catching_up)
        # Its blocks are the dataset's here as well, and come from its origin.
        assert other.held.block_source(block).origin is other.catalog.get(NAME).origin
        assert [one.id for one in other.catalog.generations(other.catalog.get(NAME))] == [current, newer, old]
        assert other.catalog.view(other.catalog.get(NAME)).snapshot == current
        assert other.used.is_read(old)
        assert reader.used.is_read(old)
        joined = await bench.node([current])
        await until_async(lambda: joined.has(old))
        assert joined.used.problems() == other.used.problems() == []
        assert other.used.outdated_mounts(NAME, current) == [RemoteMount("node-1", "/mnt", old)]
        with pytest.raises(Busy, match="set is mounted at /mnt on node node-1; unmount that first"):
            other.used.check_not_mounted_elsewhere(NAME)
        # A daemon that starts anew has it, and keeps what it has until it has heard of the others.
        again = bench.as_started_anew(2)
        assert [one.id for one in again.generations(again.get(NAME))] == [current, newer, old]
        await again.close()

        reader.reading.clear()
        await until_async(lambda: not other.used.is_read(old))
        await other.prune()
        assert other.has(old), "the node may come back"
        monkeypatch.setattr(used_snapshots, "GRACE_SECONDS", 0.0)
        reader.reading.append(mount(old))
        await until_async(lambda: other.used.is_read(old))
        reader.reading.clear()
        await until_async(lambda: not other.used.is_read(old))
        other.used.check_not_mounted_elsewhere(NAME)
        other.used._kept_until.clear()  # the grace that began before
        await other.prune()
        assert not other.has(old)
        assert not other.held.path(old).exists()
        assert other.has(newer)

    on_bench(tmp_path, scene)


def test_a_dataset_that_was_removed_is_kept_out_of_sight_while_another_node_reads_it(tmp_path: Path) -> None:
    old, current = snapshots(tmp_path, 2)

    async def scene(bench: Bench) -> None:
        reader = await bench.node([current, old])
        other = await bench.node([current, old])
        await other.catalog.remove(NAME)
        assert not other.has(current)
        # The node with the mount was away; it has learnt of the removal, and keeps the dataset until it is unmounted.
        await reader.catalog.note_removed(NAME, ADDED)
        reader.reading.append(mount(current))
        await until_async(lambda: other.has(current) and not other.used.is_catching_up)
        assert list(other.catalog) == []
        assert other.catalog.find(NAME) is None
        assert other.held.block_source(BlockRef(current, 3, 0)).snapshot == current
        assert other.catalog.dataset_of(current) == NAME
        assert {one.id for one in other.catalog.read_snapshots(other.used.is_read)} == {current}
        again = bench.as_started_anew(2)
        assert len(again) == 0
        assert [one.id for one in again.read_snapshots(lambda _: True)] == [current]
        await again.forget_unused(lambda _: False)
        assert again.read_snapshots(lambda _: True) == []
        await again.close()
        # A node that never had the dataset has heard of its removal, and keeps the snapshot too.
        fresh = await bench.node([])
        await fresh.catalog.note_removed(NAME, ADDED)
        await until_async(lambda: fresh.has(current))

    on_bench(tmp_path, scene)


def test_what_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _, current = snapshots(tmp_path, 4)
    monkeypatch.setattr(used_snapshots, "MAX_KEPT", 1)
    kept, beyond = sorted([first, second])

    async def scene(bench: Bench) -> None:
        reader = await bench.node([current, first, second])
        reader.reading.append(mount(first, second, stays=False))
        other = await bench.node([current])
        await until_async(lambda: other.has(kept) and other.used.problems())
        assert other.used.problems() == [
            f"dataset set: snapshot {beyond[:12]}, which node-1 reads, is not on this node, so other nodes fetch its "
            "blocks: 1 older snapshots are kept already; mount the dataset again where they are read"
        ]
        assert not other.used.is_used(beyond)
        assert other.used.outdated_mounts(NAME, current) == [], "they follow refreshes"
        monkeypatch.setattr(used_snapshots, "MAX_BYTES", 1000)
        small = await bench.node([current])
        await until_async(lambda: any("older snapshots may take 1000 B" in line for line in small.used.problems()))
        await until_async(lambda: small.errors.views())
        (error,) = small.errors.views()
        assert error.subject == "dataset set"
        assert f"snapshot {kept[:12]}, which node-1 reads, cannot be fetched: its file has" in error.message

    on_bench(tmp_path, scene)


def test_a_peer_makes_this_node_keep_nothing_but_snapshots_of_datasets_of_the_cluster(tmp_path: Path) -> None:
    old, current = snapshots(tmp_path, 2)

    async def scene(bench: Bench) -> None:
        peer = await bench.node([current, old])
        peer.reading.append(mount(old))
        strange = await bench.node([])
        same = await bench.node([current])
        await until_async(lambda: same.has(old))
        assert set(strange.sharing.shared.remote_values(USED)[f"{1:016x}"]) == {old}
        assert not strange.has(old)
        assert strange.used.problems() == []

    on_bench(tmp_path, scene)


def test_what_comes_as_a_current_snapshot_is_not_brought_a_second_time(tmp_path: Path) -> None:
    old, current = snapshots(tmp_path, 2)

    async def scene(bench: Bench) -> None:
        reader = await bench.node([old])
        other = await bench.node([current])
        other.coming.add(old)
        reader.reading.append(mount(old))
        await until_async(lambda: other.used.is_read(old))
        assert not other.used.is_coming(old)
        other.coming.clear()
        await until_async(lambda: other.has(old))

    on_bench(tmp_path, scene)


def test_snapshots_that_wait_for_their_turn_are_looked_at_again_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, current = snapshots(tmp_path, 4)
    size = (tmp_path / f"{first}.snapshot").stat().st_size
    monkeypatch.setattr(used_snapshots, "MAX_BYTES", 3 * size)
    turns = asyncio.Semaphore(0)
    fetched: list[tuple[str, int]] = []
    real = SnapshotFiles.fetch_older

    async def fetch(
        self: SnapshotFiles, snapshot_id: str, likely: Sequence[str], path: Path, most: Callable[[], int]
    ) -> object:
        await turns.acquire()
        allowed = most()
        fetched.append((snapshot_id, allowed))
        return await real(self, snapshot_id, likely, path, lambda: allowed)

    async def scene(bench: Bench) -> None:
        reader = await bench.node([current, first, second, third])
        other = await bench.node([current])
        monkeypatch.setattr(SnapshotFiles, "fetch_older", fetch)
        reader.reading.append(mount(first, second, third))
        await until_async(lambda: all(other.used.is_coming(one) for one in (first, second, third)))
        # One of them is not read any more when the turns come.
        reader.reading[:] = [mount(first, second)]
        await until_async(lambda: not other.used.is_read(third))
        for _ in range(3):
            turns.release()
        await until_async(lambda: not other.used.is_coming(third))
        await until_async(lambda: len(fetched) == 2)
        assert {one for one, _ in fetched} == {first, second}
        assert sum(allowed for _, allowed in fetched) <= 3 * size, "the bound is of all of them"

    on_bench(tmp_path, scene)


def test_a_removal_that_is_followed_leaves_what_another_node_reads(tmp_path: Path) -> None:
    old, current = snapshots(tmp_path, 2)

    async def scene(bench: Bench) -> None:
        reader = await bench.node([current, old])
        other = await bench.node([current, old])
        reader.reading.append(mount(current))
        await until_async(lambda: other.used.keep_if_read(current))
        source = other.held.block_source(BlockRef(current, 3, 0))
        assert other.store.put(source.key, b"x" * 1000) is not None
        other.store.index.commit()
        await other.changes.remove(NAME)
        assert list(other.catalog) == []
        assert other.has(current)
        assert not other.has(old)
        assert list(other.store.index.blocks_of(source.key[:CONTENT_ID_SIZE]))
        again = bench.as_started_anew(2)
        assert [one.id for one in again.read_snapshots(lambda _: True)] == [current]
        await again.close()
        await other.prune()
        assert other.has(current)
        # Where no node reads it, nothing stays.
        reader.reading.clear()
        await reader.changes.remove(NAME)
        assert not reader.has(current)

    on_bench(tmp_path, scene)


def test_a_current_snapshot_that_comes_since_it_is_read_is_not_brought_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, current = snapshots(tmp_path, 2)
    monkeypatch.setattr(shared_datasets, "MIN_RETRY_PAUSE", 0.01)
    coming, asked = {current}, list[str]()

    def comes(snapshot: str) -> bool:
        asked.append(snapshot)
        return snapshot in coming

    async def scene(bench: Bench) -> None:
        reader, other = await bench.node([current]), await bench.node([old])
        for node in (reader, other):
            shared = SharedDatasets(node.sharing.shared, node.used._files, node.used._local, comes)
            await start(shared, node)
            bench.running.append(asyncio.create_task(shared.run()))
        fresh = reader.catalog.get(NAME)
        fresh.record = msgspec.structs.replace(fresh.record, listed=ChangeStamp(1000, f"{1:016x}", 1))
        reader.catalog.shared.note_change(NAME)
        await until_async(lambda: current in asked)
        assert not shared.is_coming(current)
        assert not other.has(current)
        coming.clear()
        await until_async(lambda: other.has(current))

    on_bench(tmp_path, scene)


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
@pytest.mark.parametrize("which", ["current", "older"])
def test_a_snapshot_is_not_fetched_for_nothing_while_its_dataset_is_listed_here(
    begins: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be adopted, or kept, when it has come. A listing of a large bucket takes an hour."""
    old, current = snapshots(tmp_path, 2)
    monkeypatch.setattr(shared_datasets, "CHECK_SECONDS", 0.01)
    listing, fetched, refused = ExitStack(), list[str](), list[str]()
    fetch, check_idle = SnapshotFiles._fetch, Catalog.check_idle

    async def counted(self: SnapshotFiles, snapshot_id: str, *rest: object) -> object:
        fetched.append(snapshot_id)
        if begins == "meanwhile" and len(fetched) == 1:
            listing.enter_context(other.catalog._changing_name(NAME))
        return await fetch(self, snapshot_id, *rest)  # type: ignore[arg-type]

    def checked(self: Catalog, name: str) -> None:
        try:
            check_idle(self, name)
        except Busy as error:
            refused.append(str(error))
            raise

    async def scene(bench: Bench) -> None:
        nonlocal other
        reader = await bench.node([current, old])
        other = await bench.node([old] if which == "current" else [current])
        monkeypatch.setattr(SnapshotFiles, "_fetch", counted)
        monkeypatch.setattr(Catalog, "check_idle", checked)
        if begins == "before":
            listing.enter_context(other.catalog._changing_name(NAME))
        if which == "current":
            for node in (reader, other):
                shared = SharedDatasets(node.sharing.shared, node.used._files, node.used._local, lambda _: False)
                await start(shared, node)
                bench.running.append(asyncio.create_task(shared.run()))
            fresh = reader.catalog.get(NAME)
            fresh.record = msgspec.structs.replace(fresh.record, listed=ChangeStamp(1000, f"{1:016x}", 1))
            reader.catalog.shared.note_change(NAME)
        else:
            reader.reading.append(mount(old))
        await until_async(lambda: len(refused) >= 5)
        assert len(fetched) == (begins == "meanwhile")
        listing.close()
        await until_async(lambda: other.has(current if which == "current" else old))
        assert len(fetched) == 1 + (begins == "meanwhile")

    other: Node
    on_bench(tmp_path, scene)


def test_a_current_snapshot_does_not_wait_for_older_ones_also_where_it_was_first_heard_of_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *olds, previous, current = sorted(snapshots(tmp_path, 6))  # in this order they have their turns
    monkeypatch.setattr(shared_datasets, "MIN_RETRY_PAUSE", 0.01)
    fetch, fetched, held_up = SnapshotFiles._fetch, list[str](), asyncio.Event()

    async def slow(self: SnapshotFiles, snapshot_id: str, *rest: object) -> object:
        fetched.append(snapshot_id)
        if snapshot_id in olds:
            await held_up.wait()
        return await fetch(self, snapshot_id, *rest)  # type: ignore[arg-type]

    async def scene(bench: Bench) -> None:
        reader = await bench.node([current, *olds])
        other = await bench.node([previous])
        monkeypatch.setattr(SnapshotFiles, "_fetch", slow)
        reader.reading.append(mount(*olds, current))
        await until_async(lambda: len(fetched) == 1 and all(other.used.is_coming(one) for one in (*olds, current)))
        shared: list[SharedDatasets] = []
        for node in (reader, other):
            one = SharedDatasets(node.sharing.shared, node.used._files, node.used._local, node.used.is_transferring)
            node.used._is_coming_as_current = one.is_coming
            await start(one, node)
            bench.running.append(asyncio.create_task(one.run()))
            shared.append(one)
        fresh = reader.catalog.get(NAME)
        fresh.record = msgspec.structs.replace(fresh.record, listed=ChangeStamp(1000, f"{1:016x}", 1))
        reader.catalog.shared.note_change(NAME)
        await until_async(lambda: other.has(current))
        assert len(set(fetched) & set(olds)) == 1
        held_up.set()
        await until_async(lambda: all(other.has(one) for one in olds))
        assert sorted(fetched) == sorted([*olds, current]), "each is fetched once"

    on_bench(tmp_path, scene)


def test_a_snapshot_that_is_being_kept_stays_though_the_others_of_its_dataset_are_dropped(tmp_path: Path) -> None:
    arriving, read, current = snapshots(tmp_path, 3)

    async def scene(bench: Bench) -> None:
        reader, other = await bench.node([current, read]), await bench.node([current, read])
        reader.reading.append(mount(read))
        await until_async(lambda: other.used.keep_if_read(read))
        await other.changes.remove(NAME)
        record = DatasetRecord(NAME, f"file://{bench.root}", OriginOptions(), [], added=ADDED)
        with other.held.receive_file() as path:
            shutil.copy(bench.root / f"{arriving}.snapshot", path)
            keeping = asyncio.create_task(other.catalog.keep_older_snapshot(arriving, record, path))
            await asyncio.sleep(0)
            await other.catalog.forget_unused(lambda one: one.id == arriving)
            dataset = await keeping
        assert other.has(arriving)
        await other.catalog.forget_unused(lambda one: one.id == arriving)
        assert [one.id for one in dataset.record.snapshots] == [arriving]
        assert other.has(arriving)
        assert not other.has(read)

    on_bench(tmp_path, scene)


def test_a_removal_waits_for_a_snapshot_that_comes_from_another_node(tmp_path: Path) -> None:
    current, arriving = snapshots(tmp_path, 2)

    async def scene(bench: Bench) -> None:
        node = await bench.node([current])
        wanted = msgspec.structs.replace(node.catalog.get(NAME).record, snapshots=[])
        with node.held.receive_file() as path:
            shutil.copy(bench.root / f"{arriving}.snapshot", path)
            keeping = asyncio.create_task(node.catalog.keep_older_snapshot(arriving, wanted, path))
            while not node.catalog._changing:  # noqa: ASYNC110 - it begins in one of the next turns
                await asyncio.sleep(0)
            with pytest.raises(Busy):
                await node.changes.remove(NAME)
            await node.catalog.wait_until_adopted(NAME)
            assert keeping.done()
        both = node.catalog.generations(node.catalog.get(NAME))
        [before, kept] = [{entry.content for entry in one.walk_files(one.entry(0))} for one in both]
        [new] = kept - before
        node.store.put(block_key(new, 0), bytes(1000))
        await node.changes.remove(NAME)
        assert not node.has(arriving)
        assert not node.has(current)
        assert not node.store.keys()

    on_bench(tmp_path, scene)


def test_a_removal_is_of_all_adds_that_other_nodes_tell_of_though_they_were_not_followed_yet(tmp_path: Path) -> None:
    (current,) = snapshots(tmp_path, 1)

    async def scene(bench: Bench) -> None:
        nodes = [await bench.node([current]) for _ in range(2)]
        shared: list[SharedDatasets] = []
        for number, node in enumerate(nodes, 1):
            dataset = node.catalog.get(NAME)
            dataset.record = msgspec.structs.replace(dataset.record, added=[ChangeStamp(5, f"{number:016x}", number)])
            one = SharedDatasets(node.sharing.shared, node.used._files, node.used._local, lambda _: False)
            await start(one, node)
            shared.append(one)
        first, second = nodes
        bench.running.append(asyncio.create_task(shared[1].run()))
        await until_async(lambda: first.sharing.shared.remote_values(DATASETS))
        await first.changes.remove(NAME)  # it has heard of the other's add, and follows it from now on
        bench.running.append(asyncio.create_task(shared[0].run()))
        await until_async(lambda: second.catalog.find(NAME) is None)
        await asyncio.sleep(10)
        assert first.catalog.find(NAME) is None

    on_bench(tmp_path, scene)
