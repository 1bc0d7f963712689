"""Which nodes of the cluster may have a block, and which one is to bring it from the origin."""

from dataclasses import dataclass

from cachefs_daemon.cluster.view import NodeRecord


@dataclass(frozen=True, slots=True)
class Route:
    """Where a block that is not on this node may be. None of the nodes named is this one."""

    # Asked in this order whether they have it. That costs them a look-up.
    may_have: tuple[NodeRecord, ...] = ()
    # The node that all others have bring it, so that it leaves the origin once. None: this node.
    brings: NodeRecord | None = None
    # The one that all others ask where that cannot be asked. None: this node.
    stands_in: NodeRecord | None = None
    # Is this node to keep it? Else it is a copy of another's.
    is_mine: bool = False
    # Asked in this order whether they have it, before this node asks the origin, for itself or for another node.
    before_origin: tuple[NodeRecord, ...] = ()

    @property
    def leads_elsewhere(self) -> bool:
        """Is any other node to be asked?"""
        return self.brings is not None or bool(self.may_have or self.before_origin)

    @classmethod
    def of(
        cls,
        me: str,
        holder: NodeRecord | None,
        home: NodeRecord | None,
        after: NodeRecord | None = None,
        before: tuple[NodeRecord, ...] = (),
    ) -> "Route":
        """me: id of this node. holder: keeps the cluster's copy. home: brings it from the origin. Who holds a block
        changes all the time, and nodes may differ about it for a moment; the home of a block is the same to all. after:
        the next one in rendezvous order. before: others that may have the block. For each of them None, or a record of
        this node, stands for this node."""
        holder, home, after = (one if one is not None and one.id != me else None for one in (holder, home, after))
        others = [one for one in before if one.id != me]
        # A home that holds it is asked once, to bring it if need be, unless others may have it.
        first = [holder, *others] if others or holder is not home else []
        may_have = {one.id: one for one in first if one is not None}
        # A node that leaves gives what it holds to the home.
        is_leaving = holder is not None and holder.state not in ("active", "joining")
        is_mine = holder is None or (is_leaving and home is None)
        return cls(tuple(may_have.values()), home, after if after is not home else None, is_mine)
