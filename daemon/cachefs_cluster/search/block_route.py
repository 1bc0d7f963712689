"""Routes of blocks: which nodes of the cluster may have a block, and which one fetches it from the origin."""

from dataclasses import dataclass

from cachefs_cluster.membership.view import NodeRecord


@dataclass(frozen=True, slots=True)
class BlockRoute:
    """Nodes that may have, or can fetch, a block that is not on this node. This node is never among them."""

    # Asked in this order whether they have the block, at the cost of a look-up each.
    possible_holders: tuple[NodeRecord, ...] = ()
    # The home: the node through which all others fetch the block, so that it leaves the origin once. None: this node.
    fetching_node: NodeRecord | None = None
    # The stand-in that all others ask if the home cannot be asked. None: this node.
    stand_in_node: NodeRecord | None = None
    # Whether this node keeps the block; otherwise it holds a mere copy.
    is_kept_here: bool = False
    # Asked in this order whether they have the block, before this node asks the origin, for itself or for a peer.
    asked_before_origin: tuple[NodeRecord, ...] = ()

    @property
    def has_other_nodes(self) -> bool:
        """Whether any other node is to be asked."""
        return self.fetching_node is not None or bool(self.possible_holders or self.asked_before_origin)

    @classmethod
    def from_records(
        cls,
        me: str,
        holder: NodeRecord | None,
        home: NodeRecord | None,
        after: NodeRecord | None = None,
        before: tuple[NodeRecord, ...] = (),
    ) -> "BlockRoute":
        """Build a route from records; None, or a record of this node, stands for this node.

        me: id of this node. holder: keeps the cluster's copy; holders change all the time, and nodes may briefly differ
        about them. home: fetches the block from the origin; the same for all nodes. after: next node in rendezvous
        order. before: others that may have the block.
        """
        holder, home, after = (one if one is not None and one.id != me else None for one in (holder, home, after))
        others = [one for one in before if one.id != me]
        # A home that is also the holder gets a single request, to give or fetch the block, unless others may have it.
        first = [holder, *others] if others or holder is not home else []
        may_have = {one.id: one for one in first if one is not None}
        # A leaving node hands its blocks to their home.
        is_leaving = holder is not None and holder.state not in ("active", "joining")
        is_mine = holder is None or (is_leaving and home is None)
        return cls(tuple(may_have.values()), home, after if after is not home else None, is_mine)
