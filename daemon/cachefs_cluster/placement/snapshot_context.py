"""Interface between a shared snapshot and its node."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachefs.planning.blocks.space import BlockSpace, Ids, Samples
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.sequences.plan import Plan
from cachefs_cluster.placement.group_orders import GroupOrders
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.holders import HolderState
from cachefs_cluster.placement.timeliness import NOTHING_SETTLED, Settled
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.runtime.threads import Threads


class EpochPosition(NamedTuple):
    """Progress of one consumer."""

    node: str
    epoch: int
    done: float  # fraction of the epoch, 0 to 1
    rate: float  # epochs per second; 0: unknown


@dataclass(frozen=True, slots=True)
class SnapshotContext:
    """Parts and functions of the node that a shared snapshot uses."""

    # Id of this node.
    me: str
    plan: Plan
    standing: Ownership
    threads: Threads
    plan_memory: PlanMemory
    orders: GroupOrders
    replicas: int
    # Returns the blocks of a group's samples, given the digest of a member's map; None: the snapshot is not here yet.
    # Raises CachefsError.
    load_samples: Callable[[ConsumerGroup, str], Awaitable[Samples | None]]
    # Returns the known positions of the group's consumers.
    positions_of: Callable[[ConsumerGroup], Sequence[EpochPosition]]
    # Returns the names in the plan of the group's consumers on this node.
    own_keys: Callable[[ConsumerGroup], Sequence[str]]
    # Returns earlier holders, also for a running job: from this node, or from another.
    load_holders: Callable[[BlockSpace], Awaitable[HolderState | None]]
    # Stores the holders of a snapshot.
    store_holders: Callable[[str, HolderState], None]
    # Called with blocks that this node keeps from now on: they may be transient ones.
    adopt_blocks: Callable[[BlockSpace, Ids], None]
    # Removes the stored holders of a snapshot.
    remove_holders: Callable[[str], None] = lambda snapshot: None
    # Returns the epochs that a node has settled for a group's job.
    settled_epochs: Callable[[str, ConsumerGroup], Settled] = lambda node, group: NOTHING_SETTLED
    # Returns whether other nodes coordinate copies by this group.
    is_coordinated_elsewhere: Callable[[ConsumerGroup], bool] = lambda group: False
    # Returns whether all other nodes have got their blocks since the ring changed.
    are_others_complete: Callable[[], bool] = lambda: False
