"""Which nodes of the cluster may have a block, and which one is to bring it from the origin."""

from dataclasses import dataclass

from cachefs_daemon.cluster.view import NodeRecord


@dataclass(frozen=True, slots=True)
class Route:
    """Where a block that is not on this node may be. None of the nodes named is this one."""

    # Asked in this order whether they have it. That costs them a look-up.
    may_have: tuple[NodeRecord, ...] = ()
    # The node that all others ask, so that the block leaves the origin once. None: this node, which keeps the block.
    brings: NodeRecord | None = None
    # The one that all others ask where that cannot be asked. None: this node.
    stands_in: NodeRecord | None = None

    @classmethod
    def of(
        cls,
        me: str,
        holder: NodeRecord | None,
        home: NodeRecord | None,
        after: NodeRecord | None = None,
        before: tuple[NodeRecord, ...] = (),
    ) -> "Route":
        """me: id of this node. holder: keeps the cluster's copy. home: of the block; where its copy is not with the
        holder it may still be there. after: the next one in rendezvous order. before: those that had the block before.
        For each of them None, or a record of this node, stands for this node."""
        holder, home, after = (one if one is not None and one.id != me else None for one in (holder, home, after))
        # A node that drains, or that is away, is to get no new blocks; but it may have some.
        leaving = holder if holder is not None and holder.state not in ("active", "joining") else None
        brings = home if leaving is not None else holder
        may_have = {one.id: one for one in (leaving, home, *before) if one is not None and one.id != me}
        if brings is not None:
            may_have.pop(brings.id, None)
            if may_have:
                # It is asked first without fetching, as others may have it.
                may_have = {brings.id: brings, **may_have}
        return cls(tuple(may_have.values()), brings, after if after is not brings else None)
