"""A node joins the ring once it knows what the others know, and leaves it without losing what only it holds."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from cachefs.cluster_messages import DrainStatus
from cachefs.errors import ConfigError, NotFound
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.cooperation.filled import not_filled
from cachefs_daemon.sharing.peer_http import PeerFailed
from cachefs_daemon.sharing.state import SharedState

log = logging.getLogger(__name__)

# Path on the control endpoint.
DRAIN: Final = "/drain"
# Seconds that a node which joins waits until it has heard of the others.
JOIN_SECONDS: Final = 5.0
_POLL: Final = 0.05
ASK_SECONDS: Final = 5.0
_MOST_ANSWER: Final = 256 << 10
_UNDO: Final = b"undo"


class Draining:
    """Used on the event loop."""

    def __init__(self, membership: Membership, shared: SharedState, has_readers: Callable[[], bool]) -> None:
        """has_readers: do jobs read on this node? It leaves when they have ended."""
        self._membership = membership
        self._shared = shared
        self._has_readers = has_readers
        self._draining = False
        self._has_left = False
        shared.endpoint.add("POST", DRAIN, self._answer)

    async def join(self) -> None:
        """Count for placement, once the other nodes have said what they know, or have had time to."""
        loop = asyncio.get_running_loop()
        until = loop.time() + JOIN_SECONDS
        while loop.time() < until and self._has_to_hear():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(_POLL)
        if not self._draining:
            await self._membership.announce("active")

    def _has_to_hear(self) -> bool:
        return not all(self._shared.has_heard(one.id) for one in self._membership.view.reachable)

    async def drain(self, node: str, *, undo: bool = False) -> DrainStatus:
        """Drain a node, by its name or id; empty: this one. To be called again for how far that is. undo: it is not to
        leave after all. Raises NotFound, ConfigError, PeerFailed."""
        record = self._find(node)
        if record.id == self._membership.view.me:
            return await (self.stay_here() if undo else self.drain_here())
        try:
            raw = await self._shared.http.post(record, DRAIN, ASK_SECONDS, _MOST_ANSWER, _UNDO if undo else b"")
            return msgspec.msgpack.decode(raw, type=DrainStatus)
        except (PeerFailed, msgspec.MsgspecError) as error:
            what = "stay" if undo else "drain"
            raise PeerFailed(f"node {record.name} at {record.address} cannot be told to {what}: {error}") from None

    async def stay_here(self) -> DrainStatus:
        """This node does not leave after all, and takes its part again. Raises ConfigError where it has left."""
        mine = self._membership.view.mine
        if mine is None:
            raise ConfigError("this node is in no cluster")
        if self._has_left:
            raise ConfigError(f"node {mine.name} has left the cluster; start its daemon anew, and it joins again")
        if self._draining:
            self._draining = False
            log.info("this node drains no more, and takes its part again")
            await self._membership.announce("active")
        return DrainStatus(mine.id, mine.name)

    async def drain_here(self) -> DrainStatus:
        """As `drain`, of this node. Raises ConfigError where nobody can take over."""
        view = self._membership.view
        mine = view.mine
        others = [one for one in view.reachable if one.state == "active"]
        if mine is None:
            raise ConfigError("this node is in no cluster")
        if not self._draining:
            if not others:
                raise ConfigError("no other node can take over what this one holds; nothing is drained")
            self._draining = True
            log.info("this node drains: others take over what it holds")
            await self._membership.announce("draining")
        status = self._status(mine, others)
        if status.done and not self._has_left and not self._has_readers():
            self._has_left = True
            log.info(
                "this node holds nothing that others need, and has left the cluster: it asks no other node any more, "
                "and what is read here and not in its tiers comes from origins; started anew, it joins again"
            )
            await self._membership.leave()
        return msgspec.structs.replace(status, has_left=self._has_left)

    def _status(self, mine: NodeRecord, others: list[NodeRecord]) -> DrainStatus:
        view = self._membership.view
        if self._has_left:
            return DrainStatus(mine.id, mine.name, done=True)
        lacking = not_filled(self._shared, view, others)
        blocks, size = sum(one[1] for one in lacking), sum(one[2] for one in lacking)
        done = view.me not in view.ring and not lacking
        return DrainStatus(mine.id, mine.name, blocks, size, [one[0].name for one in lacking], done)

    def _find(self, node: str) -> NodeRecord:
        """Raises NotFound."""
        view = self._membership.view
        if not node and view.mine is not None:
            return view.mine
        found = [one for one in view.members if node in (one.id, one.name)]
        if not found and self._has_left:
            raise NotFound(f"this node has left the cluster and knows no node {node!r}; ask a node that is in it")
        if len(found) != 1:
            names = ", ".join(sorted(one.name for one in view.members)) or "none"
            which = "no node" if not found else f"{len(found)} nodes"
            raise NotFound(f"{which} of the cluster is called {node!r}; nodes: {names}; ids: `cachectl cluster --json`")
        return found[0]

    async def _answer(self, request: web.Request) -> web.Response:
        status = await (self.stay_here() if await request.read() == _UNDO else self.drain_here())
        return web.Response(body=msgspec.msgpack.encode(status), content_type="application/msgpack")
