"""Several nodes in one process that share state over loopback, for tests of the room `sharing`."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable
from itertools import repeat

from cachefs_cluster.membership.membership import Listener
from cachefs_cluster.membership.view import ClusterView, NodeRecord, State
from cachefs_cluster.sharing.blobs import SharedBlobs
from cachefs_cluster.sharing.consumers import PublishedConsumers
from cachefs_cluster.sharing.security import INSECURE, ConnectionSecurity
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.runtime.threads import Threads


def node_record(number: int, port: int = 1, incarnation: int = 1) -> NodeRecord:
    """A node on loopback, whose id and incarnation are these numbers."""
    return NodeRecord(f"{number:016x}", f"{incarnation:016x}", f"node-{number}", "127.0.0.1", 1, port, state="active")


class ToldMembership:
    """A membership that says what a test tells it."""

    def __init__(self, me: NodeRecord, members: Iterable[NodeRecord] = (), list_epoch: int = 0) -> None:
        """list_epoch: of a static list; 0 where there is none."""
        self._list_epoch = list_epoch
        self.callbacks: list[Listener] = []
        self.heard_of: list[str] = []
        self.lost_ones: list[str] = []
        self.view = ClusterView()
        self.tell(me, members)

    def tell(self, me: NodeRecord, members: Iterable[NodeRecord]) -> None:
        """The view is this one from now on."""
        others = [record for record in members if record.id != me.id]
        everybody = tuple(sorted([me, *others], key=lambda record: record.id))
        epoch, source = (self._list_epoch, "static") if self._list_epoch else (1, "test")
        self.view = ClusterView(epoch, me.id, everybody, tuple(record.id for record in everybody), source)
        for callback in self.callbacks:
            callback(self.view)

    def add_listener(self, callback: Listener) -> None:
        self.callbacks.append(callback)

    def note_response(self, node_id: str, incarnation: str = "") -> None:
        self.heard_of.append(node_id)

    def note_silence(self, node_id: str) -> None:
        self.lost_ones.append(node_id)

    def note_record(self, record: NodeRecord) -> None: ...

    async def start(self) -> None: ...

    async def announce(self, state: State) -> None: ...

    async def refresh(self) -> None: ...

    async def stop(self) -> None: ...


class SharingNode:
    """One node, and all that it has for sharing state."""

    def __init__(
        self, record: NodeRecord, threads: Threads, security: ConnectionSecurity = INSECURE, list_epoch: int = 0
    ) -> None:
        self.record = record
        self.membership = ToldMembership(record, list_epoch=list_epoch)
        self.shared = SharedState("test", self.membership, security)
        self.blobs = SharedBlobs(self.shared, threads)
        self.consumers = PublishedConsumers(self.shared, self.blobs)

    async def start(self, port: int = 0) -> None:
        await self.shared.start("127.0.0.1", port)
        self.record = dataclasses.replace(self.record, control_port=self.shared.endpoint.port)

    def meet(self, *others: "SharingNode") -> None:
        """These are in the cluster, and nobody else."""
        self.membership.tell(self.record, [other.record for other in others])


def introduce(nodes: Iterable[SharingNode]) -> None:
    """All of them are in one cluster from now on."""
    everybody = list(nodes)
    for node in everybody:
        node.meet(*everybody)


@contextlib.asynccontextmanager
async def sharing_nodes(
    count: int, securities: Iterable[ConnectionSecurity] = repeat(INSECURE)
) -> AsyncIterator[list[SharingNode]]:
    """Start so many nodes, which know each other, and stop them at the end of the block. securities: of each node."""
    threads = Threads()
    secured = zip(range(1, count + 1), securities, strict=False)
    nodes = [SharingNode(node_record(number), threads, security) for number, security in secured]
    try:
        for node in nodes:
            await node.start()
        introduce(nodes)
        yield nodes
    finally:
        for node in nodes:
            await node.shared.stop()
        threads.close()
