"""The peers as a source of blocks: nodes that have a block, or fetch it from the origin for all nodes."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachefs.messages import BlockRef
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.peers.peer_requests import BlockRequest
from cachefs_cluster.search.home_routes import BlockRoute
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_cluster.search.peer_search import PeerSearch, SearchSteps
from cachefs_cluster.search.search_state import PeerBlockClient, PeerSearchState, SearchCounts
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.ports import FoundBlock, FoundCallback

# Concurrent reads from peers, as a multiple of those from origins: most of them wait for an origin too, and several
# nodes have one each.
PEER_READS_PER_ORIGIN_READ: Final = 2
# Seconds that reads from an origin wait for their turn before some are given to idle nodes: with a waiting reader, and
# without.
DELEGATE_AFTER_SECONDS: Final = 0.5
DELEGATE_AHEAD_AFTER_SECONDS: Final = 2.0
# Nodes asked for a block that this node cannot get from its origin, at most; and snapshots for which the last giver of
# such a block is remembered.
MAX_NODES_SEARCHED: Final = 64
MAX_GIVERS: Final = 1024


class PeerSource:
    """All other nodes, as one source of blocks: the port `BlockPeers`. Used on the event loop."""

    has_nodes: Final = True

    def __init__(
        self,
        peers: PeerBlockClient,
        find_route: Callable[[BlockSource], BlockRoute | None],
        membership: Membership,
        origin_limiter: ConcurrencyLimiter,
        missing_snapshots: MissingSnapshots,
        *,
        steal: bool = True,
    ) -> None:
        """find_route: returns the route of a block that is not on this node; None if only the origin is left.
        origin_limiter: permits of reads from origins. missing_snapshots: nodes that *find_route* skips. steal: whether
        nodes may fetch blocks for an overloaded one."""
        self._find_route = find_route
        self._origin_limiter = origin_limiter
        # Reads from peers have lanes of their own: peers respond while an origin hangs, and their receive windows limit
        # the bytes in flight.
        self.limiter = ConcurrencyLimiter(
            PEER_READS_PER_ORIGIN_READ * origin_limiter.count, origin_limiter.capacity, origin_limiter.weights
        )
        self._search_state = PeerSearchState(peers, missing_snapshots)
        self._membership = membership
        self._can_delegate = steal
        self._servers: dict[str, _PeerServer] = {}  # by node id
        self._givers: dict[str, str] = {}  # by snapshot: id of the node that last gave a block that this one cannot get

    @property
    def counts(self) -> SearchCounts:
        """Counts of requests to peers."""
        return self._search_state.counts

    def silent_nodes(self) -> dict[str, float]:
        """Return nodes without a heartbeat since the last request: loop time of noticing, by id."""
        return self._search_state.silent_nodes()

    @property
    def queued_ahead(self) -> int:
        """Searches without a waiting reader that wait for their turn."""
        return self.limiter.queued_ahead

    def find_route(self, fetch: BlockFetch) -> "SearchRoute | None":
        """Return the route of a block that is not on this node; None if only the origin is left. No other node is asked
        to fetch a block for a peer."""
        route = self._find_route(fetch.source)
        if route is None:
            return None
        if fetch.is_for_peer:
            own = BlockRoute(route.possible_holders, is_kept_here=True, peers_before_origin=route.peers_before_origin)
            return SearchRoute(self, fetch, own) if own.has_other_nodes else None
        return SearchRoute(self, fetch, route)

    def search(self, fetch: BlockFetch, route: BlockRoute, on_result: FoundCallback) -> PeerSearch | None:
        """Return a search for a block, not started yet; None if no peer can be asked. on_result: see `PeerSearch`."""
        may_take = partial(self._origin_limiter.is_idle, fetch.source.origin.endpoint)
        return self._make_search(fetch, _steps_of_route(route), may_take, on_result)

    def search_all(self, fetch: BlockFetch, on_result: FoundCallback) -> PeerSearch | None:
        """Return a search among all nodes, for a block that this node cannot get from its origin: for example a
        directory that only some nodes have."""
        usable = self._search_state.peers.is_usable
        nodes = [node for node in self._membership.view.reachable if usable(node.id)]
        # Only one of many may have the directory: the last giver first, then random order.
        random.shuffle(nodes)
        giver = self._givers.get(fetch.source.snapshot)
        nodes.sort(key=lambda node: node.id != giver)
        steps = [(node, True) for node in nodes[:MAX_NODES_SEARCHED]]
        search = self._make_search(
            fetch, steps, _never, partial(self._remember_giver, fetch.source.snapshot, on_result)
        )
        if search is not None:
            search.searches_all_nodes = True
        return search

    def _remember_giver(self, snapshot: str, on_result: FoundCallback, one: FoundBlock | None) -> None:
        if one is not None:
            self._givers.pop(snapshot, None)
            self._givers[snapshot] = one.node_id
            if len(self._givers) > MAX_GIVERS:
                del self._givers[next(iter(self._givers))]
        on_result(one)

    def _make_search(
        self,
        fetch: BlockFetch,
        steps: SearchSteps,
        can_take_over: Callable[[], bool],
        on_result: FoundCallback,
    ) -> PeerSearch | None:
        source, usable = fetch.source, self._search_state.peers.is_usable
        first = next((node for node, _ in steps if usable(node.id)), None)
        if first is None:
            return None
        lane = self._servers.setdefault(first.id, _PeerServer())
        return PeerSearch(
            request=BlockRequest(
                BlockRef(source.snapshot, source.entry, source.number),
                source.key,
                source.length,
                fetch.permit.job,
                fetch.permit.purpose.urgent_at,
            ),
            steps=steps,
            recompute_steps=partial(self._recompute_steps, source),
            permit=self.limiter.new_permit(
                source.key, source.length, lane, ahead=not fetch.has_reader, purpose=fetch.permit.purpose
            ),
            has_reader=fetch.has_reader,
            deadline=fetch.deadline.until,
            can_take_over=can_take_over if self._can_delegate else _never,
            on_result=on_result,
            state=self._search_state,
        )

    def _recompute_steps(self, source: BlockSource) -> SearchSteps:
        route = self._find_route(source)
        return _steps_of_route(route) if route is not None else []

    def can_delegate(self, node_id: str, seconds: float, *, ahead: bool) -> bool:
        """Return whether the requesting node may fetch a block for this one, whose reads from the origin wait *seconds*
        for their turn. ahead: no reader waits for the block yet."""
        if not self._can_delegate or seconds < (DELEGATE_AHEAD_AFTER_SECONDS if ahead else DELEGATE_AFTER_SECONDS):
            return False
        return self._membership.view.get(node_id) is not None and self._search_state.peers.is_usable(node_id)

    def search_delegated(self, fetch: BlockFetch, node_id: str, on_result: FoundCallback) -> PeerSearch | None:
        """Return a search, not started yet, for a block that a requesting node is to fetch, and count it; None if the
        node cannot be asked any more."""
        node = self._membership.view.get(node_id)
        search = self.search(fetch, BlockRoute(fetching_node=node), on_result) if node is not None else None
        if search is not None:
            self.counts.given += 1
        return search

    def on_view(self, view: ClusterView) -> None:
        """Forget nodes that left the cluster."""
        self._servers = {node: lane for node, lane in self._servers.items() if view.get(node) is not None}
        self._search_state.keep_known_nodes(lambda node: view.get(node) is not None)


@dataclass(frozen=True, slots=True, eq=False)
class SearchRoute:
    """A route, with the block for which it was computed."""

    _peer_source: PeerSource
    _fetch: BlockFetch
    _route: BlockRoute

    @property
    def is_kept_here(self) -> bool:
        """Whether this node keeps the block; otherwise it holds a mere copy."""
        return self._route.is_kept_here

    def search(self, on_result: FoundCallback) -> PeerSearch | None:
        """Return a search, not started yet; None if no node of the route can be asked."""
        return self._peer_source.search(self._fetch, self._route, on_result)


class _PeerServer:
    """A peer as seen by ConcurrencyLimiter: each has a lane of its own, so a hanging peer does not delay reads from
    others."""

    width = 1 << 20
    readahead_bytes = math.inf  # the receive window limits the bytes in flight


def _steps_of_route(route: BlockRoute) -> SearchSteps:
    """Return the nodes to ask in order, each with whether it should fetch the block."""
    steps = [(node, False) for node in route.possible_holders]
    if route.fetching_node is not None:
        steps.append((route.fetching_node, True))
        if route.stand_in_node is not None:
            steps.append((route.stand_in_node, True))
    else:
        steps += [(node, False) for node in route.peers_before_origin]
    return steps


def _never() -> bool:
    return False
