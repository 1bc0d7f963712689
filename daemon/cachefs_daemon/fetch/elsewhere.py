"""Blocks that other nodes of the cluster have, or bring from the origin for all nodes."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from cachefs.messages import BlockRef
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import ClusterView, NodeRecord
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.flights import Flight
from cachefs_daemon.fetch.route import Route
from cachefs_daemon.fetch.search import Experience, Found, Peers, Search, SearchCounts, Steps
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.fetch.snapshot_lacks import SnapshotLacks
from cachefs_daemon.peers.answers import Wanted

# Reads from peers that are under way at once, as a multiple of those from origins: most of them wait for an origin too,
# and there are several nodes that have one.
WIDER: Final = 2
# Seconds that reads from an origin have to wait for their turn until some of them are given to nodes that have nothing
# to do there: where readers wait, and where nobody does yet.
BEHIND: Final = 0.5
BEHIND_AHEAD: Final = 2.0
# Nodes that are asked for a block that this node cannot get from its origin, at most; and snapshots of which it is
# remembered who gave the last such block.
MOST_ASKED: Final = 64
MOST_GIVERS: Final = 1024


class Elsewhere:
    """All other nodes, as one source of blocks. Used on the event loop."""

    def __init__(
        self,
        peers: Peers,
        route: Callable[[BlockSource], Route | None],
        membership: Membership,
        origin_slots: FetchSlots,
        lacks: SnapshotLacks,
        *,
        steal: bool = True,
    ) -> None:
        """route: of a block that is not on this node; None where only this node and the origin come into question.
        origin_slots: of reads from origins. lacks: which nodes *route* is to pass over. steal: may nodes bring blocks
        for one that is behind?"""
        self.route = route
        # Reads from peers wait for a lane of their own, not for an origin's: peers are there when the origin hangs, and
        # their own windows say how many bytes are on the way.
        self.slots = FetchSlots(WIDER * origin_slots.count, origin_slots.capacity)
        self._experience = Experience(peers, lacks)
        self._membership = membership
        self._steal = steal
        self._lanes: dict[str, _Lane] = {}  # by id of the node
        self._givers: dict[str, str] = {}  # by snapshot: id of the node that gave what this one cannot bring

    @property
    def counts(self) -> SearchCounts:
        """Questions to peers."""
        return self._experience.counts

    def silent_nodes(self) -> dict[str, float]:
        """Nodes that gave no sign of life when they were last asked: when that was noticed (loop time), by id."""
        return self._experience.silent_nodes()

    def search(
        self, flight: Flight, route: Route, may_take: Callable[[], bool], found: Callable[[Found | None], None]
    ) -> Search | None:
        """What looks for a block once it begins; None where no peer can be asked. may_take, found: see `Search`."""
        return self._search(flight, _steps(route), may_take, found)

    def search_all(self, flight: Flight, found: Callable[[Found | None], None]) -> Search | None:
        """The same where this node cannot get the block from its origin, as with a directory that only some nodes have:
        what asks some of all nodes to bring it."""
        usable = self._experience.peers.usable
        nodes = [node for node in self._membership.view.reachable if usable(node.id)]
        # Only one of many may have the directory: the one that gave the last block of it first, then in any order.
        random.shuffle(nodes)
        giver = self._givers.get(flight.source.snapshot)
        nodes.sort(key=lambda node: node.id != giver)
        steps = [(node, True) for node in nodes[:MOST_ASKED]]
        search = self._search(flight, steps, _never, partial(self._given, flight.source.snapshot, found))
        if search is not None:
            search.insists = True
        return search

    def _given(self, snapshot: str, found: Callable[[Found | None], None], one: Found | None) -> None:
        """That has come of a search among all nodes."""
        if one is not None:
            self._givers.pop(snapshot, None)
            self._givers[snapshot] = one.node.id
            if len(self._givers) > MOST_GIVERS:
                del self._givers[next(iter(self._givers))]
        found(one)

    def _search(
        self, flight: Flight, steps: Steps, may_take: Callable[[], bool], found: Callable[[Found | None], None]
    ) -> Search | None:
        source, usable = flight.source, self._experience.peers.usable
        first = next((node for node, _ in steps if usable(node.id)), None)
        if first is None:
            return None
        lane = self._lanes.setdefault(first.id, _Lane())
        return Search(
            wanted=Wanted(BlockRef(source.snapshot, source.entry, source.number), source.key, source.length),
            steps=steps,
            steps_anew=partial(self._steps_anew, source),
            slot=self.slots.slot(source.key, source.length, lane, ahead=not flight.demanded, needed=flight.needed),
            hurried=flight.demanded,
            until=flight.patience.until,
            may_take=may_take if self._steal else _never,
            found=found,
            experience=self._experience,
        )

    def _steps_anew(self, source: BlockSource) -> Steps:
        route = self.route(source)
        return _steps(route) if route is not None else []

    def note_reader(self, snapshot: str, node_id: str) -> None:
        """This node has just told that node that it does not have the snapshot."""
        self._experience.lacks.note_reader(snapshot, node_id)

    def able(self, node_id: str, seconds: float, *, ahead: bool) -> NodeRecord | None:
        """The node that asks, if it may bring a block for this one, whose reads from the origin wait for so many
        seconds. ahead: nobody waits for the block yet."""
        if not self._steal or seconds < (BEHIND_AHEAD if ahead else BEHIND):
            return None
        node = self._membership.view.get(node_id)
        return node if node is not None and self._experience.peers.usable(node_id) else None

    def on_view(self, view: ClusterView) -> None:
        """The cluster is like that now."""
        self._lanes = {node: lane for node, lane in self._lanes.items() if view.get(node) is not None}
        self._experience.keep(lambda node: view.get(node) is not None)


class _Lane:
    """One peer, to the slots. So one that hangs does not hold up those that wait for others."""

    width = 1 << 20
    ahead_bytes = math.inf  # the receive window says how many may be on the way


def _steps(route: Route) -> Steps:
    """Whom to ask, in order, and whether to have it bring the block."""
    steps = [(node, False) for node in route.may_have]
    if route.brings is not None:
        steps.append((route.brings, True))
        if route.stands_in is not None:
            steps.append((route.stands_in, True))
    else:
        steps += [(node, False) for node in route.before_origin]
    return steps


def _never() -> bool:
    return False
