"""Datasets of a simulated cluster: nodes that add, refresh and remove them, and tell each other over HTTP.

Each node has the product's catalog, snapshot files, shared state and what follows from them, connected by `NodeSharing`
over the simulated network. Their small files lie in a directory of the run. Snapshots are built and checked here.
"""

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

from cachefs import snapshot_builder
from cachefs.errors import Busy, CachefsError, OriginUnavailable
from cachefs.messages import DatasetAddRequest
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_cluster.cluster_directory import ClusterDirectory
from cachefs_cluster.directory.used_snapshots import LocalDatasets
from cachefs_cluster.membership.identity import NodeIdentity, make_own_record
from cachefs_cluster.membership.shared import SharedMembership
from cachefs_cluster.node_sharing import NodeSharing, SharingContext
from cachefs_cluster.section import ClusterSection
from cachefs_cluster.sharing import snapshot_check
from cachefs_cluster.sharing.snapshot_check import verify_snapshot
from cachefs_daemon.datasets import catalog as catalogs
from cachefs_daemon.datasets import open_snapshots, records, stamps
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.stamps import ChangeStamp
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.ports import LocalRead
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from tests.simulation.cluster import Broken, Cluster
from tests.simulation.etcd import HOST, NodeStore
from tests.simulation.loop import PROCESS, Process
from tests.simulation.node import BLOCK_SIZE, CLUSTER, PORT
from tests.simulation.origin import SimulatedOrigin
from tests.simulation.system import _Like

NAMES: Final = ("a", "b")
# Seconds within which all nodes have the same datasets after the last fault.
AGREED: Final = 90.0
GRACE: Final = 10.0


@dataclass
class Changes:
    """What follows a change of a dataset: `cachefs_daemon.content.dataset_changes.DatasetChanges`, without blocks."""

    catalog: Catalog
    is_read_elsewhere: Callable[[str], bool]

    async def follow_snapshot(self, dataset: Any, before: Any) -> None: ...

    async def follow_limits(self, dataset: Any) -> None: ...

    async def apply_origin_access(self, name: str, way: Any) -> None: ...

    async def remove(self, name: str) -> None:
        await self.catalog.remove(name, self.is_read_elsewhere)


@dataclass
class DatasetNode:
    """A node that shares datasets."""

    number: int
    cluster: Cluster
    directory: Path
    clock_offset: float
    process: Process | None = None
    catalog: Catalog | None = None
    held: OpenSnapshots | None = None
    sharing: NodeSharing | None = None
    membership: SharedMembership | None = None
    changes: Changes | None = None
    # Snapshots that a mount of this node reads, by dataset.
    mounted: dict[str, str] = field(default_factory=dict)
    _starts: int = 0

    @property
    def host(self) -> str:
        return f"10.0.0.{self.number}"

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive and self.sharing is not None

    def start(self) -> None:
        self._starts += 1
        self.process = Process(self.cluster.loop, self.host, clock_offset=self.clock_offset)
        self.process.start(self._run())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        if self.held is not None:
            for held in self.held._open_snapshots.values():  # as the kernel closes its files
                held.snapshot.close()
        self.sharing = self.catalog = self.held = None

    async def _run(self) -> None:
        section = ClusterSection(
            membership="etcd", cluster=CLUSTER, name=f"n{self.number}", listen=f"{self.host}:{PORT}",
            insecure_peers=True, etcd=("http://etcd:2379",), grace=GRACE,
        )  # fmt: skip
        threads, errors = Threads(), ErrorLog()
        identity = NodeIdentity(f"{self.number:016x}", f"{self.number * 1000 + self._starts:016x}")
        membership = SharedMembership(
            NodeStore(self.cluster.etcd), make_own_record(section, identity, 1 << 30, 0), GRACE, self.directory
        )
        held = OpenSnapshots(self.directory / "snapshots", BLOCK_SIZE)
        directory = ClusterDirectory()
        catalog = Catalog(self.directory, held, OriginSettings(), threads, directory)
        changes = Changes(catalog, lambda one: sharing.used.keep_if_read(one))
        here = LocalDatasets(
            catalog,
            held,
            cast(Any, changes),
            errors,
            lambda name: "/mnt" if name in self.mounted else "",
            self._reading,
        )
        jobs = cast(Any, SimpleNamespace(consumers=[]))
        sharing = NodeSharing(SharingContext(section, membership, None, None, here, jobs, threads, cast(Any, None)))
        directory.connect(sharing)
        await membership.start()
        await sharing.start()
        await membership.announce("active")
        self.membership, self.held, self.catalog, self.changes, self.sharing = (
            membership, held, catalog, changes, sharing,
        )  # fmt: skip

    def _reading(self) -> Iterator[LocalRead]:
        for name, snapshot in self.mounted.items():
            yield LocalRead(name, [snapshot], "/mnt", stays_after_refresh=True)

    async def add(self, name: str) -> None:
        assert self.catalog is not None
        async for _ in self.catalog.add(DatasetAddRequest(name=name, url=f"s3://bucket/{name}")):
            pass

    async def refresh(self, name: str) -> None:
        assert self.catalog is not None
        async for _ in self.catalog.refresh(name):
            pass

    async def remove(self, name: str) -> list[ChangeStamp]:
        """Return the adds that were removed."""
        assert self.catalog is not None
        assert self.sharing is not None
        assert self.changes is not None
        added = list(self.catalog.get(name).record.added)
        if name in self.mounted:
            raise Busy(f"dataset {name} is mounted at /mnt")
        self.sharing.used.check_not_mounted_elsewhere(name)
        await self.changes.remove(name)
        return added

    def mount(self, name: str) -> None:
        """Read the current snapshot, and stay at it."""
        dataset = self.catalog.find(name) if self.catalog is not None else None
        if dataset is not None and dataset.current is not None and self.sharing is not None:
            self.mounted[name] = dataset.current.id
            self.sharing.used.note_reads_changed()


class DatasetStorm:
    """One run."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self.cluster = cluster
        self.chances = cluster.chances
        self.loop = cluster.loop
        self.root = root
        self.nodes: list[DatasetNode] = []
        self.removed: dict[str, set[ChangeStamp]] = {name: set() for name in NAMES}  # adds that were removed

    async def run(self) -> None:
        chances, cluster = self.chances, self.cluster
        for name in NAMES:
            for number in range(2):
                cluster.store.put(f"{name}/f{number}".encode(), chances.randint(1, 1000))
        for number in range(1, chances.randint(3, 4) + 1):
            directory = self.root / f"n{number}"
            directory.mkdir()
            self.nodes.append(DatasetNode(number, cluster, directory, chances.choice((0.0, -300.0, 5.0))))
            self.nodes[-1].start()
        await self._until(lambda: all(node.is_up for node in self.nodes), "nodes start")
        await asyncio.sleep(1.0)
        tasks = [self.loop.create_task(self._after(chances.random() * 4)) for _ in range(chances.randint(3, 10))]
        if tasks:
            await asyncio.wait(tasks, timeout=120.0)
        for task in tasks:
            if not task.done():
                raise Broken("every wait ends", "a change of a dataset or a fault does not end")
            task.result()
        await self._rest()

    async def _after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        events = [self._add, self._add, self._refresh, self._refresh, self._remove, self._restart, self._partition,
                  self._etcd_away, self._power, self._mount, self._unmount]  # fmt: skip
        event = self.chances.choice(events)
        node = self.chances.choice(self.nodes)
        self.cluster.trace(event.__name__, node.host)
        await event(node)

    async def _in(self, node: DatasetNode, work: Callable[[], Any]) -> Any:
        """Do something in the daemon of a node. Returns None where it is refused, or the node is killed."""
        process = node.process
        if not node.is_up or process is None:
            return None
        ended: asyncio.Future[Any] = self.loop.create_future()

        async def do() -> None:
            try:
                result = await work()
            except CachefsError as error:
                self.cluster.trace("refused", node.host, type(error).__name__, error)
                result = None
            if not ended.done():
                ended.set_result(result)

        def killed() -> None:
            if not ended.done():
                ended.set_result(None)

        process.on_end.append(killed)
        process.start(do())
        return await ended

    async def _add(self, node: DatasetNode) -> None:
        name = self.chances.choice(NAMES)
        await self._in(node, lambda: node.add(name))

    async def _refresh(self, node: DatasetNode) -> None:
        name = self.chances.choice(NAMES)
        self.cluster.store.put(f"{name}/f{self.chances.randrange(3)}".encode(), self.chances.randint(1, 1000))
        await self._in(node, lambda: node.refresh(name))

    async def _remove(self, node: DatasetNode) -> None:
        name = self.chances.choice(NAMES)
        removed = await self._in(node, lambda: node.remove(name))
        if removed:
            self.cluster.trace("removed", node.host, name, *removed)
            self.removed[name].update(removed)

    async def _mount(self, node: DatasetNode) -> None:
        if node.is_up and node.process is not None:
            node.process.run(node.mount, self.chances.choice(NAMES))

    async def _unmount(self, node: DatasetNode) -> None:
        node.mounted.clear()

    async def _restart(self, node: DatasetNode) -> None:
        node.kill()
        await asyncio.sleep(self.chances.choice((0.05, 1.0, 5.0)))
        if node.process is None or not node.process.is_alive:
            node.start()

    async def _power(self, node: DatasetNode) -> None:
        self.loop.network.power(node.host, on=False)
        node.kill()
        await asyncio.sleep(self.chances.random() * 10)
        self.loop.network.power(node.host, on=True)
        if node.process is None or not node.process.is_alive:
            node.start()

    async def _partition(self, node: DatasetNode) -> None:
        hosts = [one.host for one in self.nodes] + [HOST]
        self.chances.shuffle(hosts)
        at = self.chances.randint(1, len(hosts) - 1)
        for one in hosts[:at]:
            for other in hosts[at:]:
                self.loop.network.cut(one, other)
                self.loop.network.cut(other, one)
        await asyncio.sleep(self.chances.random() * 20)
        self.loop.network.heal()

    async def _etcd_away(self, node: DatasetNode) -> None:
        self.cluster.etcd.is_down = True
        await asyncio.sleep(self.chances.random() * 5)
        self.cluster.etcd.is_down = False

    # --- the end --------------------------------------------------------------------------------------------------

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        end = self.loop.time() + AGREED
        while not holds():
            if self.loop.time() > end:
                raise Broken("nodes converge", f"{what}: not within {AGREED:.0f} s: {self._shown()}")
            await asyncio.sleep(0.5)

    async def _rest(self) -> None:
        self.cluster.trace("rest")
        await self._until(lambda: all(node.is_up for node in self.nodes), "nodes start")
        await self._until(self._agree, "all nodes have the same datasets")
        await self._until(self._is_held, "all nodes have the snapshots that are read")
        await asyncio.sleep(5.0)
        if self.cluster.broken is not None:
            raise self.cluster.broken
        if not self._agree():
            raise Broken("nodes converge", f"they do not stay alike: {self._shown()}")
        for node in self.nodes:
            self._check(node)

    def _agree(self) -> bool:
        first = self._has(self.nodes[0])
        return all(node.is_up and self._has(node) == first and self._is_settled(node) for node in self.nodes)

    def _has(self, node: DatasetNode) -> dict[str, tuple[str, tuple[ChangeStamp, ...]]]:
        assert node.catalog is not None
        return {
            one.record.name: (one.current.id if one.current is not None else "", tuple(sorted(one.record.added)))
            for one in node.catalog
        }

    def _is_settled(self, node: DatasetNode) -> bool:
        assert node.sharing is not None
        return not node.sharing.is_behind

    def _is_held(self) -> bool:
        """Has each node the snapshots that mounts of any node read?"""
        read = {snapshot for node in self.nodes for snapshot in node.mounted.values()}
        return all(node.held is not None and node.held.get(one) is not None for node in self.nodes for one in read)

    def _check(self, node: DatasetNode) -> None:
        """What must hold of one node once all is quiet."""
        assert node.catalog is not None
        assert node.held is not None
        for dataset in node.catalog:
            name = dataset.record.name
            if set(dataset.record.added) <= self.removed[name]:
                raise Broken("what was removed stays removed", f"{name} is on n{node.number}: {self._shown()}")
            if dataset.current is None or node.held.get(dataset.current.id) is None:
                raise Broken("snapshots are held", f"n{node.number} lacks that of {name}")

    def _shown(self) -> str:
        return "; ".join(
            f"n{node.number}: "
            + (
                str({name: (one[:6], len(added)) for name, (one, added) in self._has(node).items()})
                + (" behind" if not self._is_settled(node) else "")
                + "".join(f" ({line})" for line in (node.sharing.problems() if node.sharing else []))
                if node.is_up
                else "down"
            )
            for node in self.nodes
        )


async def datasets(cluster: Cluster) -> None:
    """Run one schedule."""
    root = Path(tempfile.mkdtemp(prefix="cachefs-simulated-", dir="/dev/shm"))
    try:
        with _in_this_process(cluster):
            await DatasetStorm(cluster, root).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _in_this_process(cluster: Cluster) -> Iterator[None]:
    """Build and check snapshots here, wait for no disk, and draw nonces by the seed."""
    chances = random.Random(cluster.chances.random())

    async def build_snapshot(request: Any) -> AsyncIterator[Path]:
        store, process = cluster.store, PROCESS.get()
        assert process is not None
        await asyncio.sleep(0.05 + chances.random() * chances.choice((0.1, 2.0)))
        if store.weather.is_down:
            raise OriginUnavailable("connection refused")
        prefix = request.url.removeprefix("s3://bucket/").encode() + b"/"
        objects = [
            ListedObject(key.removeprefix(prefix), size, 0, version)
            for key, (version, size) in sorted(store.objects.items())
            if key.startswith(prefix)
        ]
        yield build_snapshot_file(
            objects, request.url, request.block_size, lambda key: prefix + key, Path(request.directory)
        )

    async def check(self: Any, path: Path, size: int) -> Any:
        await asyncio.sleep(0.01)
        return verify_snapshot(path)

    def open_origin(url: str, *_: Any) -> SimulatedOrigin:
        origin = SimulatedOrigin(cluster.store)
        origin.url = url
        return origin

    unsynced = {"fsync": lambda _: None}
    with (
        mock.patch.object(catalogs, "build_snapshot", build_snapshot),
        mock.patch.object(catalogs, "open_origin", open_origin),
        mock.patch.object(snapshot_check.SnapshotChecker, "check", check),
        mock.patch.object(stamps, "secrets", SimpleNamespace(randbits=chances.getrandbits)),
        mock.patch.object(snapshot_builder, "os", _Like(os, **unsynced)),
        mock.patch.object(open_snapshots, "os", _Like(os, **unsynced)),
        mock.patch.object(records, "os", _Like(os, **unsynced)),
    ):
        yield
