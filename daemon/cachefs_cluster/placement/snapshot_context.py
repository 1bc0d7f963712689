"""Interface between a shared snapshot and its node."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids, Samples
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.cluster.schedule import Announcement
from cachefs.planning.sequences.plan import Plan
from cachefs_cluster.placement.group_orders import GroupOrders
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.holders import HolderState
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
    # Returns the states of a snapshot's blocks on this node (see cachefs.planning.blocks.presence): shape (blocks,),
    # uint8; None if they are not watched.
    states_of: Callable[[str], npt.NDArray[np.uint8] | None]
    # Publishes the announcement that this node follows for a snapshot.
    publish_announcement: Callable[[str, Announcement], None] = lambda snapshot, announcement: None
    # Returns whether all other nodes have got their blocks since the ring changed.
    are_others_complete: Callable[[], bool] = lambda: False
