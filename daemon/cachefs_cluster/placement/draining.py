"""Joins the ring, and leaves it without losing blocks that only this node holds.

A node joins once it has received the state of the others. It leaves by a drain: it announces "draining", other nodes
take over its blocks, and the drain is done when the nodes that stay have them. Several nodes may announce at once, each
having seen another active. So a draining node checks upon each change of the view: if no node stays, the first draining
node by name cancels its drain, and the others go on.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from cachefs.cluster_messages import DrainStatus
from cachefs.errors import ConfigError, NotFound
from cachefs.formatting import format_names
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.placement.rebalance_status import incomplete_nodes
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.state import SharedState

log = logging.getLogger(__name__)

# Path on the control endpoint.
DRAIN_PATH: Final = "/drain"
# Seconds that a joining node waits for the state of the others.
JOIN_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
# Seconds that each node by name waits for the one before it to cancel its drain.
STAY_SECONDS: Final = 3.0
REQUEST_SECONDS: Final = 5.0
_MAX_RESPONSE: Final = 256 << 10
_UNDO_BODY: Final = b"undo"
# Names of nodes listed in a message.
_MAX_NAMES: Final = 5


class DrainController:
    """Drives the join and the drain of this node. Used on the event loop."""

    def __init__(self, membership: Membership, shared: SharedState, has_readers: Callable[[], bool]) -> None:
        """has_readers: returns whether jobs read on this node. It leaves when they have ended."""
        self._membership = membership
        self._shared = shared
        self._has_readers = has_readers
        self._is_draining = False
        self._has_left = False
        self._changed = asyncio.Event()  # set when the view changes, or a drain begins here
        membership.add_listener(lambda _: self._changed.set())
        shared.endpoint.add_route("POST", DRAIN_PATH, self._handle_request)

    async def run(self) -> None:
        """Join, then watch for a drain that has to be cancelled. Runs as long as the daemon."""
        await self.join()
        loop = asyncio.get_running_loop()
        alone_since: float | None = None
        while True:
            self._changed.clear()
            pause = None
            if not self._has_no_successor():
                alone_since = None
            else:
                alone_since = loop.time() if alone_since is None else alone_since
                pause = alone_since + STAY_SECONDS * self._drain_rank() - loop.time()
                if pause <= 0:
                    alone_since = None
                    await self._cancel_drain_alone()
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    async def join(self) -> None:
        """Announce this node as active, once the other nodes have sent their state, or JOIN_SECONDS have passed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + JOIN_SECONDS
        while loop.time() < until and self._is_waiting_for_state():  # noqa: ASYNC110 - no event
            await asyncio.sleep(_POLL_SECONDS)
        if not self._is_draining:
            await self._membership.announce("active")

    def _is_waiting_for_state(self) -> bool:
        return not all(self._shared.has_responded(one.id) for one in self._membership.view.reachable)

    async def drain(self, node: str, *, undo: bool = False) -> DrainStatus:
        """Drain a node, by its name or id; empty: this one. Call again to poll the status. undo: cancel the drain.
        Raises NotFound, ConfigError, PeerFailed."""
        record = self._find_node(node)
        if record.id == self._membership.view.me:
            return await (self.cancel_own_drain() if undo else self.drain_this_node())
        try:
            raw = await self._shared.http.post(
                record, DRAIN_PATH, REQUEST_SECONDS, _MAX_RESPONSE, _UNDO_BODY if undo else b""
            )
            return msgspec.msgpack.decode(raw, type=DrainStatus)
        except (PeerFailed, msgspec.MsgspecError) as error:
            what = "stay" if undo else "drain"
            raise PeerFailed(
                f"node {record.name} at {record.address} could not be sent the command to {what}: {error}"
            ) from None

    def _has_no_successor(self) -> bool:
        """Return whether this node drains although no other node stays: none is active, and none that counts for
        placement may come back."""
        view = self._membership.view
        return (
            self._is_draining
            and not self._has_left
            and not any(one.state == "active" or (one.state == "away" and one.id in view.ring) for one in view.others)
        )

    def _drain_rank(self) -> int:
        """Return how many draining nodes come before this one by name and id: the first stays."""
        view = self._membership.view
        mine = view.own_record
        assert mine is not None
        draining = [(one.name, one.id) for one in view.reachable if one.state == "draining"]
        return sum(1 for one in draining if one < (mine.name, mine.id))

    async def _cancel_drain_alone(self) -> None:
        log.warning(
            "no other node stays in the cluster: %s; this node cancels its drain and stays",
            self._no_successor_text(),
        )
        self._is_draining = False
        await self._membership.announce("active")

    def _no_successor_text(self) -> str:
        """Describe why the other nodes cannot take over."""
        names = sorted(one.name for one in self._membership.view.reachable if one.state == "draining")
        if not names:
            return "it is the only node"
        return f"{format_names(names, _MAX_NAMES)} drain{'s' * (len(names) == 1)} too"

    async def cancel_own_drain(self) -> DrainStatus:
        """Cancel the drain of this node. Raises ConfigError if it has left."""
        mine = self._membership.view.own_record
        if mine is None:
            raise ConfigError("this node is in no cluster")
        if self._has_left:
            raise ConfigError(f"node {mine.name} has left the cluster; restart its daemon to join again")
        if self._is_draining:
            self._is_draining = False
            log.info("the drain of this node is cancelled; it takes its share of blocks again")
            await self._membership.announce("active")
        return DrainStatus(mine.id, mine.name)

    async def drain_this_node(self) -> DrainStatus:
        """Drain this node, as `drain`. Raises ConfigError if no other node can take over."""
        mine = self._membership.view.own_record
        if mine is None:
            raise ConfigError("this node is in no cluster")
        if not self._is_draining:
            if not self._active_others():
                raise ConfigError(
                    f"no other node can take over the blocks of this node ({self._no_successor_text()}); nothing is "
                    "drained"
                )
            self._is_draining = True
            log.info("this node drains: other nodes take over its blocks")
            await self._membership.announce("draining")
            self._changed.set()
        status = self._status(mine)
        if status.done and not self._has_left and not self._has_readers():
            self._has_left = True
            log.info(
                "this node holds no block that other nodes need, and has left the cluster: its reads that miss its "
                "tiers go to the origins; restart its daemon to join again"
            )
            await self._membership.leave()
        return msgspec.structs.replace(status, has_left=self._has_left)

    def _active_others(self) -> list[NodeRecord]:
        return [one for one in self._membership.view.reachable if one.state == "active"]

    def _status(self, mine: NodeRecord) -> DrainStatus:
        view, others = self._membership.view, self._active_others()
        if self._has_left:
            return DrainStatus(mine.id, mine.name, done=True)
        lacking = incomplete_nodes(self._shared, view, others)
        blocks, size = sum(one[1] for one in lacking), sum(one[2] for one in lacking)
        stays = [one for one in others if one.id in view.ring]
        done = view.me not in view.ring and bool(stays) and not lacking
        return DrainStatus(mine.id, mine.name, blocks, size, [one[0].name for one in lacking], done)

    def _find_node(self, node: str) -> NodeRecord:
        """Return the node with this name or id. Raises NotFound."""
        view = self._membership.view
        if not node and view.own_record is not None:
            return view.own_record
        found = [member for member in view.members if node in (member.id, member.name)]
        if not found and self._has_left:
            raise NotFound(f"this node has left the cluster and knows no node {node!r}; ask a node that is in it")
        if len(found) != 1:
            names = ", ".join(sorted(member.name for member in view.members)) or "none"
            which = "no node" if not found else f"{len(found)} nodes"
            raise NotFound(f"{which} of the cluster is called {node!r}; nodes: {names}; ids: `cachectl cluster --json`")
        return found[0]

    async def _handle_request(self, request: web.Request) -> web.Response:
        status = await (self.cancel_own_drain() if await request.read() == _UNDO_BODY else self.drain_this_node())
        return web.Response(body=msgspec.msgpack.encode(status), content_type="application/msgpack")
