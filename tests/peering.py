"""Nodes that exchange blocks, for tests: real stores, real peer servers, and a client, without daemons around them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from cachefs.block import TIER_NAMES
from cachefs.errors import NotFound
from cachefs.messages import BlockRef, FetchRequest
from cachefs_cluster.membership.membership import Listener
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import ClusterView, NodeRecord, State
from cachefs_cluster.peers.client import PeerClient
from cachefs_cluster.peers.peer_requests import BlockRequest, PeerResponse, RequestOptions
from cachefs_cluster.peers.server_process import PeerServers, ServerSettings
from cachefs_cluster.peers.tls import Certificates, TlsFiles
from cachefs_daemon.api.fetch_channel import FetchChannelServer
from cachefs_daemon.api.identity import CallerRights
from cachefs_daemon.fetch.fetcher import PeerOutcome, PeerResultCallback
from cachefs_daemon.runtime.error_log import ErrorLog
from tests.blockstore import OpenStore, data_of, key_of, store_config

CLUSTER = "test"
# A wait that takes longer is a hang.
DEADLINE = 20.0
ME = "00000000000000aa"


def node_id(number: int) -> str:
    return f"{number:016x}"


def record(number: int, port: int, **fields: Any) -> NodeRecord:
    values = {"id": node_id(number), "incarnation": f"{number + 100:016x}", "name": f"node-{number}", **fields}
    values.setdefault("host", "127.0.0.1")
    return NodeRecord(data_port=port, control_port=max(1, port - 1), state="active", **cast(Any, values))


class KnownMembership:
    """Members that a test sets."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.refreshed = 0
        self.lost_nodes: list[str] = []
        self.heard_of: dict[str, str] = {}
        self._listeners: list[Listener] = []

    def set(self, view: ClusterView) -> None:
        self.view = view
        for listener in self._listeners:
            listener(view)

    def add_listener(self, callback: Listener) -> None:
        self._listeners.append(callback)

    async def start(self) -> None: ...

    async def announce(self, state: State) -> None: ...

    async def refresh(self) -> None:
        self.refreshed += 1

    def note_response(self, node_id: str, incarnation: str = "") -> None:
        self.heard_of[node_id] = incarnation

    def note_silence(self, node_id: str) -> None:
        self.lost_nodes.append(node_id)

    def note_record(self, record: NodeRecord) -> None: ...

    async def stop(self) -> None: ...


def view_of(me: str, members: Sequence[NodeRecord], epoch: int = 7, source: str = "etcd") -> ClusterView:
    ordered = tuple(sorted(members, key=lambda one: one.id))
    return ClusterView(epoch, me, ordered, tuple(one.id for one in ordered), source)


class ServingNode:
    """A node that others may ask. It runs from the start of an `async with` block."""

    def __init__(
        self,
        root: Path,
        number: int = 1,
        *,
        tls: TlsFiles | None = None,
        name: str = "",
        secret: ClusterSecret | None = None,
        hosts: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
    ) -> None:
        root.mkdir(exist_ok=True)
        self._listen = [(host, port) for host in hosts]
        self.number = number
        self.name = name or f"node-{number}"
        self.store = OpenStore(store_config(root, memory=8 << 20, ssd=16 << 20))
        self.errors = ErrorLog()
        self.asked: list[FetchRequest] = []  # of the daemon
        # What the daemon answers where it is asked: an outcome, or None for never.
        self.bring: Callable[[FetchRequest], PeerOutcome | None] = lambda _: NotFound("no such block")
        self.delay = 0.0  # seconds until it does
        self._tls = tls
        self._secret = secret
        self._root = root

    async def __aenter__(self) -> "ServingNode":
        admission = CallerRights(0)
        self.channel = FetchChannelServer(self._root / "s.ch", admission, cast(Any, None), self.errors)
        tiers = {TIER_NAMES[number]: self._root / TIER_NAMES[number] for number in (0, 1)}
        places = ServerSettings(self._listen, self.store.index_path, tiers, self._tls, 1, self._secret)
        self.membership = KnownMembership(ClusterView())
        self.servers = PeerServers(CLUSTER, self.membership, places, self._adopt, self.errors)
        first, *others = (host for host, _ in self._listen)
        self.record = record(self.number, self.servers.port, name=self.name, host=first, rails=tuple(others))
        asker = record(int(ME, 16), 1, name="asker")
        self.membership.set(view_of(self.record.id, [self.record, asker]))
        await self.servers.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.servers.stop()
        await self.channel.stop(0)
        self.store.close()

    def put(self, *numbers: int, size: int = 100_000) -> None:
        for number in numbers:
            assert self.store.put(key_of(number), data_of(number, size)) is not None
        self.store.index.commit()

    def complaints(self) -> str:
        return "\n".join(f"{one.subject}: {one.message}" for one in self.errors.views())

    async def _adopt(self, link: socket.socket) -> None:
        await self.channel.adopt_connection(link, self._ask)

    def _ask(self, fetch: FetchRequest, patience: float, answer: PeerResultCallback) -> None:
        self.asked.append(fetch)
        outcome = self.bring(fetch)
        if outcome is not None:
            asyncio.get_running_loop().call_later(self.delay, answer, [outcome])


def wanted(number: int, size: int = 100_000) -> BlockRequest:
    return BlockRequest(BlockRef("0" * 32, number, 0), key_of(number), size)


class Asker:
    """A client, and what it was answered."""

    def __init__(
        self,
        membership: KnownMembership,
        tls: TlsFiles | None = None,
        window: int = 0,
        secret: ClusterSecret | None = None,
    ) -> None:
        self.errors = ErrorLog()
        self.membership = membership
        self.client = PeerClient(CLUSTER, membership, self.errors, Certificates(tls) if tls else None, window, secret)

    def begin(
        self, node: NodeRecord, one: BlockRequest, *, fetch: bool = False, seconds: float = DEADLINE, **how: bool
    ) -> "asyncio.Future[PeerResponse]":
        loop = asyncio.get_running_loop()
        came: asyncio.Future[PeerResponse] = loop.create_future()
        self.client.request_block(node, one, RequestOptions(loop.time() + seconds, fetch, **how), came.set_result)
        return came

    async def ask(
        self, node: NodeRecord, one: BlockRequest, *, fetch: bool = False, seconds: float = DEADLINE
    ) -> PeerResponse:
        return await asyncio.wait_for(self.begin(node, one, fetch=fetch, seconds=seconds), 3 * DEADLINE)

    def complaints(self) -> str:
        return "\n".join(f"{one.subject}: {one.message}" for one in self.errors.views())


@contextlib.asynccontextmanager
async def asker(
    *records: NodeRecord,
    tls: TlsFiles | None = None,
    epoch: int = 7,
    window: int = 0,
    secret: ClusterSecret | None = None,
) -> AsyncIterator[Asker]:
    """A client that knows these nodes."""
    me = record(int(ME, 16), 1, name="asker")
    one = Asker(KnownMembership(view_of(ME, [me, *records], epoch)), tls, window, secret)
    try:
        yield one
    finally:
        await one.client.close()
