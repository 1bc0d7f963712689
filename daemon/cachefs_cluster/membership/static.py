"""Membership by a list of nodes in the configuration, the same on all of them.

There is no source of liveness: nodes learn it from each other's responses. Ids and ring epoch follow from the list
alone, so that all nodes place blocks alike from their first moment, and two nodes with different lists notice. The list
has one address of each node; a node tells its others itself (`NodeRecord.rails`).
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Final

import xxhash

from cachefs_cluster.membership.membership import Listener
from cachefs_cluster.membership.view import ClusterView, NodeRecord, State
from cachefs_cluster.section import ClusterSection, StaticNode

log = logging.getLogger(__name__)

_EPOCH_BITS: Final = 48
# Seconds between two checks for nodes that do not answer.
_CHECK_SECONDS: Final = 1.0
# Seconds without an answer after which a node is away: longer than a restart of a daemon, or a new probe.
AWAY_SECONDS: Final = 5.0


def listed_id(cluster: str, name: str) -> str:
    """Return the id of a node in a list: xxh3_64 of the names of cluster and node, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(f"{cluster}\n{name}".encode())


def list_epoch(section: ClusterSection) -> int:
    """Return 48 bits of a digest of the list, independent of its order. Never 0."""
    lines = sorted(f"{node.name} {node.host} {node.port} {node.zone} {node.weight!r}" for node in section.static_nodes)
    digest = xxhash.xxh3_64_intdigest("\n".join([section.cluster, *lines]).encode())
    return max(1, digest >> (64 - _EPOCH_BITS))


class StaticMembership:
    """The nodes of a list. Used on the event loop, but for `view`."""

    def __init__(self, section: ClusterSection, record: NodeRecord) -> None:
        """record: of this node; id, name, zone and weight are those of the list."""
        self._grace = section.grace
        # Called once a second with the id of a node of several addresses that is silent: the messages of which it was
        # noticed go to the first address alone, and a node is alive that answers at any. Set by the node's cluster.
        self.probe: Callable[[str], None] = lambda node_id: None
        self._listeners: list[Listener] = []
        self._records = {each.id: each for each in (_listed_record(section, node) for node in section.static_nodes)}
        self._me = listed_id(section.cluster, section.own_name)
        mine = self._records[self._me]
        self._records[self._me] = dataclasses.replace(
            mine,
            incarnation=record.incarnation,
            memory=record.memory,
            ssd=record.ssd,
            state="joining",
            rails=record.rails,
        )
        # By id: monotonic time since when the node is unreachable.
        self._silent_since: dict[str, float] = {}
        self._expired: set[str] = set()  # ids of nodes whose grace is over
        self._expiry_task: asyncio.Task[None] | None = None
        self._epoch = list_epoch(section)
        self.view = self._make_view()

    def add_listener(self, callback: Listener) -> None:
        self._listeners.append(callback)

    async def start(self) -> None:
        self._expiry_task = asyncio.create_task(self._expire_regularly())

    async def announce(self, state: State) -> None:
        """Set this node's state. Other nodes learn it from its control endpoint."""
        self._set_record(dataclasses.replace(self._records[self._me], state=state))

    async def refresh(self) -> None:
        """Do nothing: a list does not change."""

    def note_response(self, node_id: str, incarnation: str = "") -> None:
        record = self._records.get(node_id)
        if record is None or node_id == self._me:
            return
        self._silent_since.pop(node_id, None)
        self._expired.discard(node_id)
        if record.state == "away":
            log.info("node %s at %s answers again", record.name, record.address)
        self._set_record(
            dataclasses.replace(
                record,
                incarnation=incarnation or record.incarnation,
                state="active" if record.state == "away" else record.state,
            )
        )

    def note_silence(self, node_id: str) -> None:
        if node_id in self._records and node_id != self._me:
            self._silent_since.setdefault(node_id, time.monotonic())

    def note_record(self, record: NodeRecord) -> None:
        known = self._records.get(record.id)
        if known is None or record.id == self._me:
            return
        self._silent_since.pop(record.id, None)
        self._expired.discard(record.id)
        self._set_record(
            dataclasses.replace(
                known,
                incarnation=record.incarnation,
                memory=record.memory,
                ssd=record.ssd,
                protocol=record.protocol,
                state=record.state,
                rails=record.rails,
            )
        )

    async def leave(self) -> None:
        """Do nothing: other nodes know that this node drains, and place nothing on it."""

    async def stop(self) -> None:
        if self._expiry_task is not None:
            self._expiry_task.cancel()
            await asyncio.gather(self._expiry_task, return_exceptions=True)
            self._expiry_task = None

    async def _expire_regularly(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self.expire(time.monotonic())

    def expire(self, now: float) -> None:
        """Mark nodes as away that are unreachable for a while, and exclude them from placement after their grace."""
        for node_id, since in list(self._silent_since.items()):
            record, seconds = self._records[node_id], now - since
            if record.rails and record.state != "away":
                self.probe(node_id)
            is_over = seconds >= self._grace
            if is_over and node_id not in self._expired:
                self._expired.add(node_id)
                log.warning(
                    "node %s at %s has not answered for %.0f s; its blocks have other homes until it does",
                    record.name,
                    record.address,
                    seconds,
                )
                self._set_record(dataclasses.replace(record, state="away"), force=True)
            elif seconds >= AWAY_SECONDS and record.state != "away":
                log.warning(
                    "node %s at %s has not answered for %.0f s; others keep its blocks until it does",
                    record.name,
                    record.address,
                    seconds,
                )
                self._set_record(dataclasses.replace(record, state="away"))

    def _set_record(self, record: NodeRecord, *, force: bool = False) -> None:
        """force: tell listeners although no record has changed, as other nodes may count for placement."""
        if self._records[record.id] == record and not force:
            return
        self._records[record.id] = record
        self.view = self._make_view()
        for callback in self._listeners:
            try:
                callback(self.view)
            except Exception:  # a bug of one listener must not affect the others
                log.exception("internal error of a listener to changes of the cluster")

    def _make_view(self) -> ClusterView:
        members = tuple(sorted(self._records.values(), key=lambda record: record.id))
        # A restarted node keeps its place while it joins, and so does one with no known state.
        ring = tuple(member.id for member in members if member.state != "draining" and member.id not in self._expired)
        return ClusterView(self._epoch, self._me, members, ring, "static")


def _listed_record(section: ClusterSection, node: StaticNode) -> NodeRecord:
    return NodeRecord(
        listed_id(section.cluster, node.name),
        "",
        node.name,
        node.host,
        node.port,
        node.port + 1,
        zone=node.zone,
        weight=node.weight,
        state="active",
    )
