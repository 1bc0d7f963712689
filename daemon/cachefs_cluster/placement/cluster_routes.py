"""Routes of blocks that are not on this node: to their holder, by the sequences of the cluster's jobs, or to their
home."""

from collections.abc import Callable
from dataclasses import replace

from cachefs.planning.cluster.homes import NO_NODE
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_cluster.search.home_routes import BlockRoute
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_daemon.datasets.block_source import BlockSource


class ClusterRoutes:
    """Computes routes from shared snapshots and homes. Used on the event loop. A route takes 30 us."""

    def __init__(
        self,
        membership: Membership,
        at_home: Callable[[BlockSource], BlockRoute | None],
        missing_snapshots: MissingSnapshots,
    ) -> None:
        """at_home: returns the route of a block that stays at home. missing_snapshots: nodes that *at_home* skips."""
        self._missing_snapshots = missing_snapshots
        self._membership = membership
        self._at_home = at_home
        self._shared: Callable[[str], SharedSnapshot | None] = _no_shared_snapshot

    def follow_snapshots(self, shared: Callable[[str], SharedSnapshot | None]) -> None:
        """Compute routes from shared snapshots too, from now on. shared: returns a shared snapshot, if jobs read it."""
        self._shared = shared

    def find_route(self, source: BlockSource) -> BlockRoute | None:
        """Return the route of a block that is not on this node; None if no other node is to be asked."""
        at_home = self._at_home(source)
        one = self._shared(source.snapshot)
        if one is None or one.space is None or one.holders is None:
            return at_home
        ids = one.holders.ring.ids
        block = int(one.space.first_block[source.entry]) + source.number
        numbers = one.holders_of_block(block)
        view = self._membership.view

        def record(number: int) -> NodeRecord | None:
            return view.get(ids[number]) if number != NO_NODE else None

        holder, home = record(numbers[0]), record(numbers[2])
        if home is not None and home.id in self._missing_snapshots.nodes_without(source.snapshot):
            home = at_home.fetching_node if at_home is not None else None
        second = one.second_holders(block)
        others = (*map(record, (*numbers[1], *second)), *map(view.get, one.former_holders(block)))
        before = [one for one in others if one is not None and one.state != "away"]
        if at_home is None:
            route = BlockRoute.from_records(view.me, holder, home, None, tuple(before))
        else:
            route = BlockRoute.from_records(
                view.me, holder, home, at_home.stand_in_node, (*before, *at_home.possible_holders)
            )
            route = replace(route, peers_before_origin=at_home.peers_before_origin)
        if one.is_hot and any(ids[number] == view.me for number in second):
            route = replace(route, is_kept_here=True)
        return route if route.has_other_nodes else None


def _no_shared_snapshot(_: str) -> None:
    return None
