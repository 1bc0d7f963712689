"""The peers as a source of blocks: nodes that have a block, or fetch it from the origin for all nodes."""

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

# Concurrent reads from peers, as a multiple of those from origins: most of them wait for an origin too, and several
# nodes have one each.
WIDER: Final = 2
# Seconds that reads from an origin wait for their turn before some are given to idle nodes: with a waiting reader, and
# without.
BEHIND: Final = 0.5
BEHIND_AHEAD: Final = 2.0
# Nodes asked for a block that this node cannot get from its origin, at most; and snapshots for which the last giver of
# such a block is remembered.
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
        """route: returns the route of a block that is not on this node; None if only the origin is left. origin_slots:
        slots of reads from origins. lacks: nodes that *route* skips. steal: whether nodes may fetch blocks for an
        overloaded one."""
        self.route = route
        # Reads from peers have lanes of their own: peers respond while an origin hangs, and their receive windows limit
        # the bytes in flight.
        self.slots = FetchSlots(WIDER * origin_slots.count, origin_slots.capacity)
        self._experience = Experience(peers, lacks)
        self._membership = membership
        self._steal = steal
        self._lanes: dict[str, _Lane] = {}  # by node id
        self._givers: dict[str, str] = {}  # by snapshot: id of the node that last gave a block that this one cannot get

    @property
    def counts(self) -> SearchCounts:
        """Counts of requests to peers."""
        return self._experience.counts

    def silent_nodes(self) -> dict[str, float]:
        """Return nodes without a heartbeat since the last request: loop time of noticing, by id."""
        return self._experience.silent_nodes()

    def search(
        self, flight: Flight, route: Route, may_take: Callable[[], bool], found: Callable[[Found | None], None]
    ) -> Search | None:
        """Return a search for a block, not started yet; None if no peer can be asked. may_take, found: see `Search`."""
        return self._search(flight, _steps(route), may_take, found)

    def search_all(self, flight: Flight, found: Callable[[Found | None], None]) -> Search | None:
        """Return a search among all nodes, for a block that this node cannot get from its origin: for example a
        directory that only some nodes have."""
        usable = self._experience.peers.usable
        nodes = [node for node in self._membership.view.reachable if usable(node.id)]
        # Only one of many may have the directory: the last giver first, then random order.
        random.shuffle(nodes)
        giver = self._givers.get(flight.source.snapshot)
        nodes.sort(key=lambda node: node.id != giver)
        steps = [(node, True) for node in nodes[:MOST_ASKED]]
        search = self._search(flight, steps, _never, partial(self._given, flight.source.snapshot, found))
        if search is not None:
            search.insists = True
        return search

    def _given(self, snapshot: str, found: Callable[[Found | None], None], one: Found | None) -> None:
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
        """Record that this node has just told another that it lacks the snapshot."""
        self._experience.lacks.note_reader(snapshot, node_id)

    def able(self, node_id: str, seconds: float, *, ahead: bool) -> NodeRecord | None:
        """Return the requesting node, if it may fetch a block for this one, whose reads from the origin wait *seconds*
        for their turn. ahead: no reader waits for the block yet."""
        if not self._steal or seconds < (BEHIND_AHEAD if ahead else BEHIND):
            return None
        node = self._membership.view.get(node_id)
        return node if node is not None and self._experience.peers.usable(node_id) else None

    def on_view(self, view: ClusterView) -> None:
        """Forget nodes that left the cluster."""
        self._lanes = {node: lane for node, lane in self._lanes.items() if view.get(node) is not None}
        self._experience.keep(lambda node: view.get(node) is not None)


class _Lane:
    """A peer as seen by FetchSlots: each has a lane of its own, so a hanging peer does not delay reads from others."""

    width = 1 << 20
    ahead_bytes = math.inf  # the receive window limits the bytes in flight


def _steps(route: Route) -> Steps:
    """Return the nodes to ask in order, each with whether it should fetch the block."""
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
