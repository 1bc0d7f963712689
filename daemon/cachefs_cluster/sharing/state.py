"""The state that the nodes of a cluster share: each node publishes its own values, and knows those of all others.

    shared.publish(CONSUMERS, "job/0", facts)                        # this node publishes a value
    shared.add_listener(CONSUMERS, lambda node, name, value: ...)    # called when another one publishes one (or None)
    shared.remote_values(CONSUMERS)                                  # {node id: {name: value}}

One long poll is in progress per pair of nodes and direction, which is answered when there is news. Nothing is sent per
block, and only an empty response every 25 s while nothing changes. Only progress changes all the time; it is sent once
a second at most, and to at most MAX_FOLLOWED other nodes for each job.
"""

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import ClusterView, NodeRecord, is_id
from cachefs_cluster.sharing.endpoint import ControlEndpoint
from cachefs_cluster.sharing.follower import NodeFollower
from cachefs_cluster.sharing.identity_conflicts import IdentityConflicts
from cachefs_cluster.sharing.local_state import ChangesPage, LocalState
from cachefs_cluster.sharing.observers import NO_OBSERVERS, Observers
from cachefs_cluster.sharing.peer_http import PeerFailed, PeerHttpClient
from cachefs_cluster.sharing.remote_state import StateChange
from cachefs_cluster.sharing.sections import CONSUMERS, PROGRESS, StateSection
from cachefs_cluster.sharing.security import INSECURE, ConnectionSecurity
from cachefs_cluster.sharing.wire import (
    COUNTERS,
    GATHER_SECONDS,
    INCARNATION,
    MAX_NODE_BYTES,
    MAX_POLL_SECONDS,
    MAX_SMALL_RESPONSE,
    PROGRESS_SECONDS,
    STATE,
    StateChanges,
    StateResponse,
    poll_seconds,
)

log = logging.getLogger(__name__)

# Most nodes whose consumers of one job are followed.
MAX_FOLLOWED: Final = 16
# Nodes that are asked for counters at the same time.
MAX_CONCURRENT_REQUESTS: Final = 32
# Seconds for which news about consumers are gathered before the followed nodes are chosen anew.
CHOICE_DELAY: Final = 0.2
# Refused values that are remembered, so that each is logged once.
_MAX_REFUSED: Final = 16384

Value = TypeVar("Value", bound=msgspec.Struct)
# id of the node, name of the value, the value; None: removed
Listener = Callable[[str, str, Any], None]


class SharedState:
    """Publishes this node's values, and follows those of the others. Used on the event loop."""

    def __init__(
        self,
        cluster: str,
        membership: Membership,
        security: ConnectionSecurity = INSECURE,
        observers: Observers = NO_OBSERVERS,
    ) -> None:
        """cluster: name of the cluster."""
        self.membership = membership
        self.endpoint = ControlEndpoint(cluster, membership, security, observers)
        view = membership.view
        self.http = PeerHttpClient(cluster, view.me, security, view.epoch if view.source == "static" else 0)
        self._own_counters: Callable[[], Awaitable[bytes]] | None = None
        self._facts, self._progress = LocalState(), LocalState()
        # By section and name: a hash of a rejected value that was logged.
        self._refused: dict[tuple[str, str], int] = {}
        self._listeners: defaultdict[str, list[Listener]] = defaultdict(list)  # by section
        self._followers: dict[str, NodeFollower] = {}  # by id of the node
        # By sender: id and incarnation, as two machines may have been given one name. Set when there is news.
        self._polls: dict[tuple[str, str], asyncio.Event] = {}
        self.identity_conflicts = IdentityConflicts()
        self._closing = False
        self._own_record: NodeRecord | None = None
        self._stopping_followers: set[asyncio.Task[None]] = set()
        self._choice_timer: asyncio.TimerHandle | None = None
        self.endpoint.add_route("GET", STATE, self._respond_to_poll)
        self.endpoint.add_route("GET", COUNTERS, self._respond_with_counters)

    async def start(self, host: str, port: int) -> None:
        """Listen on the address, and begin to follow the other nodes. Raises ConfigError."""
        await self.endpoint.start(host, port)
        self.membership.add_listener(self._on_view)
        self.add_listener(CONSUMERS, lambda node, name, value: self._choose_followed_soon())
        self._on_view(self.membership.view)

    async def stop(self) -> None:
        self._closing = True
        self._wake_polls(self._polls)
        if self._choice_timer is not None:
            self._choice_timer.cancel()
        await asyncio.gather(*(follower.stop() for follower in self._followers.values()), *self._stopping_followers)
        self._followers.clear()
        await self.endpoint.stop()
        await self.http.close()

    # --- this node's values ------------------------------------------------------------------------------------------

    def publish(self, section: StateSection[Value], name: str, value: Value) -> str:
        """Publish a value of this node, in place of its former value under that name. Return the reason why other nodes
        would reject it, or "". A rejected value is logged once, however often it is published."""
        raw, part = section.encode(value), self._local_state(section)
        before = part.get_value(section.name, name)
        if raw == before:
            return ""
        try:
            section.decode(name, raw)
            if before is None and part.count(section.name) >= section.max_values:
                raise ValueError(f"this node publishes {section.max_values:,} of them already")
            if part.size - len(before or b"") + len(raw) > MAX_NODE_BYTES:
                raise ValueError(f"this node publishes nearly {MAX_NODE_BYTES:,} bytes already")
        except ValueError as error:
            self._log_refusal(section, name, raw, str(error))
            return str(error)
        self._refused.pop((section.name, name), None)
        self._set(section, name, raw)
        return ""

    def _log_refusal(self, section: StateSection[Any], name: str, raw: bytes, why: str) -> None:
        key, mark = (section.name, name), hash((raw, why))
        if self._refused.pop(key, None) != mark:
            log.error("%s %r cannot be published to other nodes: %s", section.name, name, why)
        self._refused[key] = mark
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def remove(self, section: StateSection[Any], name: str) -> None:
        """Withdraw a value from all nodes."""
        self._refused.pop((section.name, name), None)
        self._set(section, name, None)

    def publishes(self, section: StateSection[Any], name: str) -> bool:
        """Return whether this node publishes a value of that name."""
        return self._local_state(section).get_value(section.name, name) is not None

    def published_names(self, section: StateSection[Any]) -> list[str]:
        """Return the names of this node's values."""
        return self._local_state(section).names(section.name)

    def own_value(self, section: StateSection[Value], name: str) -> Value | None:
        """Return this node's value of that name, or None."""
        raw = self._local_state(section).get_value(section.name, name)
        return msgspec.msgpack.decode(raw, type=section.kind) if raw is not None else None

    def _local_state(self, section: StateSection[Any]) -> LocalState:
        return self._progress if section is PROGRESS else self._facts

    def _set(self, section: StateSection[Any], name: str, raw: bytes | None) -> None:
        if self._local_state(section).set_value(section.name, name, raw):
            self._wake_polls(self._polls)
        if section is CONSUMERS:
            self._choose_followed_soon()

    # --- other nodes' values -----------------------------------------------------------------------------------------

    def add_listener(self, section: StateSection[Any], callback: Listener) -> None:
        """Call *callback* with each change that another node publishes from now on."""
        self._listeners[section.name].append(callback)

    def remote_values(self, section: StateSection[Value]) -> dict[str, Mapping[str, Value]]:
        """Return the other nodes' values, by node id and name."""
        found = {}
        for node, follower in self._followers.items():
            part = follower.progress if section is PROGRESS else follower.facts
            if values := part.values(section.name):
                found[node] = values
        return found

    def remote_value(self, section: StateSection[Value], node: str, name: str) -> Value | None:
        """Return one value of another node, or None."""
        follower = self._followers.get(node)
        if follower is None:
            return None
        part = follower.progress if section is PROGRESS else follower.facts
        found: Value | None = part.values(section.name).get(name)
        return found

    def node_problems(self) -> dict[str, str]:
        """Return, by node id, why a node does not answer."""
        return {node: follower.problem for node, follower in self._followers.items() if follower.problem}

    def node_record(self, node_id: str) -> NodeRecord | None:
        """Return the record of a member other than this node, or None."""
        follower = self._followers.get(node_id)
        return follower.record if follower is not None else None

    def has_responded(self, node_id: str) -> bool:
        """Return whether the node has answered since it, or this node, started. A node without datasets answers too."""
        follower = self._followers.get(node_id)
        return follower is not None and follower.facts.version > 0

    async def request_from(self, node_id: str, path: str, seconds: float, most: int) -> bytes:
        """Return the node's response to GET *path*, of at most *most* bytes. Raises PeerFailed."""
        record = self.node_record(node_id)
        if record is None:
            raise PeerFailed(f"node {node_id} is no longer in the cluster")
        return await self.http.get(record, path, seconds, most)

    def serve_counters(self, own_counters: Callable[[], Awaitable[bytes]]) -> None:
        """Serve this node's counters from now on. own_counters: returns them, packed by msgpack."""
        self._own_counters = own_counters

    async def node_counters(self, seconds: float) -> dict[str, bytes | PeerFailed]:
        """Return the counters of all other nodes by id, or the reason for their lack, within *seconds*."""
        at_once = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

        async def one(record: NodeRecord) -> bytes | PeerFailed:
            try:
                async with at_once:
                    return await self.http.get(record, COUNTERS, seconds, MAX_SMALL_RESPONSE)
            except PeerFailed as error:
                return error

        records = [follower.record for follower in self._followers.values()]
        tasks = [asyncio.create_task(one(record)) for record in records]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        found: dict[str, bytes | PeerFailed] = {}
        for record, task in zip(records, tasks, strict=True):
            if not task.done():
                task.cancel()
            found[record.id] = task.result() if task.done() else PeerFailed(f"no answer within {seconds:g} s")
        return found

    async def catch_up(self, seconds: float) -> None:
        """Wait until each other node has sent what it knows now, but no longer than *seconds*."""
        tasks = [asyncio.create_task(follower.catch_up()) for follower in self._followers.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- followers of other nodes ------------------------------------------------------------------------------------

    def _on_view(self, view: ClusterView) -> None:
        if self._closing:
            return
        present = {record.id: record for record in view.others}
        for node in [node for node in self._followers if node not in present]:
            task = asyncio.create_task(self._stop_following(self._followers.pop(node)))
            self._stopping_followers.add(task)
            task.add_done_callback(self._stopping_followers.discard)
        for node, record in present.items():
            follower = self._followers.get(node)
            if follower is None:
                self._follow(record)
            else:
                follower.update_record(record)
        for follower in self._followers.values():
            follower.poll_seconds = poll_seconds(len(view.members))
        if view.own_record != self._own_record:
            self._own_record = view.own_record
            if view.own_record is not None:
                self.http.set_incarnation(view.own_record.incarnation)
            self._facts.bump_version()
            self._wake_polls(self._polls)
        self._choose_followed_soon()

    def _follow(self, record: NodeRecord) -> None:
        follower = self._followers[record.id] = NodeFollower(
            record, self.http, self._on_changes, self._on_response, self.membership.note_silence
        )
        follower.start()

    async def _stop_following(self, follower: NodeFollower) -> None:
        await follower.stop()

    def _on_response(self, record: NodeRecord) -> None:
        self.membership.note_response(record.id, record.incarnation)
        self.membership.note_record(record)

    def _on_changes(self, node: str, changes: list[StateChange]) -> None:
        for section, name, value in changes:
            for callback in self._listeners.get(section, ()):
                try:
                    callback(node, name, value)
                except Exception:
                    log.exception("failed to apply a change that node %s published: %s %r", node, section, name)

    def _choose_followed_soon(self) -> None:
        if self._choice_timer is None and not self._closing:
            self._choice_timer = asyncio.get_running_loop().call_later(CHOICE_DELAY, self._choose_followed)

    def _choose_followed(self) -> None:
        """Choose whose progress is followed: for each job, that of the first nodes in an order that differs on each
        node, so that no node is followed by all."""
        self._choice_timer = None
        me = self.membership.view.me
        by_job: defaultdict[str, set[str]] = defaultdict(set)
        for node, values in self.remote_values(CONSUMERS).items():
            for facts in values.values():
                by_job[facts.job].add(node)
        followed: set[str] = set()
        for nodes in by_job.values():
            followed.update(sorted(nodes, key=lambda node: _mixed_order(me, node))[:MAX_FOLLOWED])
        for node, follower in self._followers.items():
            wants = node in followed
            if wants != follower.wants_progress:
                follower.wants_progress = wants
                follower.poll_now()

    # --- responses to other nodes ------------------------------------------------------------------------------------

    async def _respond_to_poll(self, request: web.Request) -> web.Response:
        sender = self.endpoint.sender(request)
        mine = self.membership.view.own_record
        if sender is None or mine is None:
            return web.Response(status=503, text="this node is in no cluster yet")
        try:
            since, progress = int(request.query["since"]), int(request.query["progress"])
            wait = min(max(0.0, float(request.query["wait"])), MAX_POLL_SECONDS)
        except (KeyError, ValueError):
            return web.Response(status=400, text="expected since, progress and wait")
        if request.query.get("of") != mine.incarnation:
            since, progress = 0, min(progress, 0)
        incarnation = request.headers.get(INCARNATION, "")
        who = (sender.id, incarnation if is_id(incarnation) else "")
        self.identity_conflicts.note_request(sender, who[1], request.remote or "", asyncio.get_running_loop().time())
        await self._wait_for_changes(who, since, progress, wait)
        mine = self.membership.view.own_record or mine
        followed = _encode_page(self._progress.changes_since(progress)) if progress >= 0 else None
        response = StateResponse(mine, _encode_page(self._facts.changes_since(since)), followed)
        return web.Response(body=msgspec.msgpack.encode(response), content_type="application/msgpack")

    async def _wait_for_changes(self, sender: tuple[str, str], since: int, progress: int, wait: float) -> None:
        """Wait until there is news for the sender, or *wait* seconds have passed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        before = self._polls.get(sender)
        event = self._polls[sender] = asyncio.Event()
        if before is not None:
            before.set()
        try:
            while not self._closing and self._polls.get(sender) is event:
                event.clear()
                left = began + wait - loop.time()
                if since != self._facts.version:
                    if since:
                        await asyncio.sleep(min(GATHER_SECONDS, max(0.0, left)))
                    return
                if progress >= 0 and progress != self._progress.version:
                    paused = began + PROGRESS_SECONDS - loop.time()
                    if paused <= 0 or progress == 0:
                        return
                    left = min(left, paused)
                if began + wait <= loop.time():
                    return
                try:
                    async with asyncio.timeout(max(0.0, left)):
                        await event.wait()
                except TimeoutError:
                    pass
        finally:
            if self._polls.get(sender) is event:
                del self._polls[sender]

    def _wake_polls(self, polls: Mapping[tuple[str, str], asyncio.Event]) -> None:
        for event in polls.values():
            event.set()

    async def _respond_with_counters(self, request: web.Request) -> web.Response:
        if self._own_counters is None:
            return web.Response(status=503, text="this node has no counters yet")
        return web.Response(body=await self._own_counters(), content_type="application/msgpack")


def _encode_page(page: ChangesPage) -> StateChanges:
    return StateChanges(page.full, page.changes, page.version)


def _mixed_order(me: str, node: str) -> bytes:
    return hashlib.blake2b(f"{me}{node}".encode(), digest_size=8).digest()
