"""A simulated etcd: records with leases, one ring that is replaced by compare and swap, and watches.

`NodeStore` is a node's way to it, with the rules of `cachefs_cluster.membership.etcd`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

from cachefs_cluster.membership.ring import Ring
from cachefs_cluster.membership.store import RECORD_SECONDS, StoreContent, StoreListener
from cachefs_cluster.membership.view import NodeRecord
from tests.simulation.loop import OUTSIDE, PROCESS, Process
from tests.simulation.system import Machine

HOST: Final = "etcd"
# Seconds that a call waits for an answer, and until the next attempt.
CALL_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = 1.0

Result = TypeVar("Result")


class _Away(Exception):
    """It does not answer."""


class _Taken(Exception):
    """Another node has this node's id."""


class Etcd:
    """The store itself."""

    def __init__(self, loop: Machine, trace: Callable[..., None]) -> None:
        self.loop = loop
        self.trace = trace
        self.is_down = False
        self.revision = 1
        self.records: dict[str, NodeRecord] = {}
        self.ring: Ring | None = None
        self.watchers: list[NodeStore] = []
        self._leases: dict[str, float] = {}

    def stored(self) -> StoreContent:
        ring = self.ring
        return StoreContent(dict(self.records), ring, ring.epoch if ring is not None else 0)

    def put(self, record: NodeRecord) -> None:
        self.keep(record.id)
        if self.records.get(record.id) != record:
            self.records[record.id] = record
            self._change("record", record.name, record.state)

    def keep(self, node_id: str) -> bool:
        """Prolong a lease. Returns whether its record is still there."""
        self._leases[node_id] = self.loop.time() + RECORD_SECONDS
        self.loop.call_later(RECORD_SECONDS + 0.001, self._expire, node_id, context=OUTSIDE)
        return node_id in self.records

    def _expire(self, node_id: str) -> None:
        if self.loop.time() >= self._leases.get(node_id, 0.0):
            self.remove(node_id)

    def remove(self, node_id: str) -> None:
        record = self.records.pop(node_id, None)
        if record is not None:
            self._change("record gone", record.name)

    def propose(self, ring: Ring, version: object) -> None:
        if version == (self.ring.epoch if self.ring is not None else 0):
            self.ring = Ring(self.revision + 1, ring.nodes)
            self._change("ring", *(node.name for node in ring.nodes))

    def _change(self, *what: str) -> None:
        self.revision += 1
        self.trace("etcd", self.revision, *what)
        for watcher in self.watchers:
            watcher.changed()


class NodeStore:
    """`cachefs_cluster.membership.store.RecordStore` of one process."""

    source = "etcd"

    def __init__(self, etcd: Etcd) -> None:
        process = PROCESS.get()
        assert process is not None
        self._etcd = etcd
        self._process: Process = process
        self._listener: StoreListener
        self._record: NodeRecord | None = None
        self._is_unsaved = False
        self._has_claimed = False
        self._proposal: tuple[Ring, object] | None = None
        self._work = asyncio.Event()
        self._looks = False
        self._known = 0  # revision that the listener knows
        self._task: asyncio.Task[None] | None = None

    def start(self, listener: StoreListener) -> None:
        self._listener = listener
        self._etcd.watchers.append(self)
        self._process.on_end.append(self._forget)
        self._task = asyncio.create_task(self._keep())

    def set_record(self, record: NodeRecord) -> None:
        self._record, self._is_unsaved = record, True
        self._work.set()

    def propose(self, ring: Ring, version: object) -> None:
        self._proposal = ring, version
        self._work.set()

    def refresh(self) -> None:
        self._looks = True
        self._work.set()

    async def stop(self) -> None:
        self._forget()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._record is not None:
            with contextlib.suppress(_Away):
                await self._call(lambda: self._etcd.remove(self._record.id if self._record is not None else ""))

    def changed(self) -> None:
        """The store has something new, which is on its way."""
        loop = self._etcd.loop
        if not loop.network.is_cut(HOST, self._process.host) and not self._etcd.is_down:
            seconds = loop.network.delay(HOST, self._process.host)
            loop.call_later(seconds, self._tell, self._etcd.stored(), self._etcd.revision,
                            context=self._process.context.copy())  # fmt: skip

    def _tell(self, stored: StoreContent, revision: int) -> None:
        if revision > self._known and self in self._etcd.watchers:
            self._known = revision
            self._listener.on_content(stored)

    def _forget(self) -> None:
        if self in self._etcd.watchers:
            self._etcd.watchers.remove(self)

    async def _keep(self) -> None:
        """Runs as long as the node: prolongs the lease, and writes what is to be written."""
        problem = ""
        while True:
            self._work.clear()
            try:
                await self._step()
            except _Away:
                said, pause = "etcd does not answer", PAUSE_SECONDS
                self._is_unsaved = True
            except _Taken:
                said, pause = problem, PAUSE_SECONDS
                self._is_unsaved = True
            else:
                said, pause = "", RECORD_SECONDS / 3
            if said != problem:
                problem = said
                self._listener.on_problem(said)
            if not said:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._work.wait()
            else:
                await asyncio.sleep(pause)

    async def _step(self) -> None:
        etcd, record = self._etcd, self._record
        if record is None:
            return
        unsaved, self._is_unsaved = self._is_unsaved, False
        if not await self._call(lambda: etcd.keep(record.id)) or unsaved:
            if (other := await self._call(lambda: self._save(record))) is not None:
                self._listener.on_id_taken(other)
                raise _Taken
            self._has_claimed = True
            self._listener.on_claimed()
        if self._proposal is not None:
            (ring, version), self._proposal = self._proposal, None
            await self._call(lambda: etcd.propose(ring, version))
        looks, self._looks = self._looks, False
        stored, revision = await self._call(lambda: (etcd.stored(), etcd.revision))
        if revision > self._known:
            self._tell(stored, revision)
        elif looks:
            self._listener.on_fresh()

    def _save(self, record: NodeRecord) -> NodeRecord | None:
        """Write this node's record. Returns that of another node that is there."""
        other = self._etcd.records.get(record.id)
        is_another = other is not None and other.incarnation != record.incarnation
        if other is not None and is_another and (self._has_claimed or other.address != record.address):
            return other
        self._etcd.put(record)
        return None

    async def _call(self, work: Callable[[], Result]) -> Result:
        """Raises _Away."""
        network, host = self._etcd.loop.network, self._process.host
        await asyncio.sleep(network.delay(host, HOST))
        if self._etcd.is_down or network.is_cut(host, HOST) or network.is_cut(HOST, host):
            await asyncio.sleep(CALL_SECONDS)
            raise _Away
        result = OUTSIDE.copy().run(work)
        await asyncio.sleep(network.delay(HOST, host))
        return result
