"""Interface between a shared snapshot and its node."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachefs.planning.blocks.samples import Samples
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.standing import Standing
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.cooperation.groups import Group
from cachefs_daemon.cooperation.holders import Known
from cachefs_daemon.cooperation.orders import GroupOrders
from cachefs_daemon.cooperation.timeliness import NOTHING_SETTLED, Settled
from cachefs_daemon.jobs.plan_room import PlanRoom
from cachefs_daemon.runtime.threads import Threads


class Place(NamedTuple):
    """Progress of one consumer."""

    node: str
    epoch: int
    done: float  # fraction of the epoch, 0 to 1
    rate: float  # epochs per second; 0: unknown


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Parts and functions of the node that a shared snapshot uses."""

    # Id of this node.
    me: str
    plan: Plan
    standing: Standing
    threads: Threads
    room: PlanRoom
    orders: GroupOrders
    replicas: int
    # Returns the blocks of a group's samples, given the digest of a member's map; None: the snapshot is not here yet.
    # Raises CachefsError.
    samples: Callable[[Group, str], Awaitable[Samples | None]]
    # Returns the known positions of the group's consumers.
    places: Callable[[Group], Sequence[Place]]
    # Returns the names in the plan of the group's consumers on this node.
    own: Callable[[Group], Sequence[str]]
    # Returns earlier holders, also for a running job: from this node, or from another.
    remembered: Callable[[BlockSpace], Awaitable[Known | None]]
    # Stores the holders of a snapshot.
    remember: Callable[[str, Known], None]
    # Called with blocks that this node keeps from now on: they may be transient ones.
    adopt: Callable[[BlockSpace, Ids], None]
    # Removes the stored holders of a snapshot.
    forget: Callable[[str], None] = lambda snapshot: None
    # Returns the epochs that a node has settled for a group's job.
    settled: Callable[[str, Group], Settled] = lambda node, group: NOTHING_SETTLED
    # Returns whether other nodes coordinate copies by this group.
    coordinated: Callable[[Group], bool] = lambda group: False
    # Returns whether all other nodes have got their blocks since the ring changed.
    filled: Callable[[], bool] = lambda: False
