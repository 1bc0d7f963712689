"""What a shared snapshot needs of its node."""

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
    """How far one consumer is."""

    node: str
    epoch: int
    done: float  # of the epoch, 0 to 1
    rate: float  # epochs per second; 0: not known


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a shared snapshot needs of the node."""

    # Id of this node.
    me: str
    plan: Plan
    standing: Standing
    threads: Threads
    room: PlanRoom
    orders: GroupOrders
    replicas: int
    # Which blocks the samples of a group are, by digest of the map: that of some of its members. Raises CachefsError;
    # None: the snapshot is not here yet.
    samples: Callable[[Group, str], Awaitable[Samples | None]]
    # Where the group's consumers are, as far as anybody knows.
    places: Callable[[Group], Sequence[Place]]
    # The names in the plan of those that read on this node.
    own: Callable[[Group], Sequence[str]]
    # What is known of who held what before, and of a job that is under way: here, or on another node.
    remembered: Callable[[BlockSpace], Awaitable[Known | None]]
    # Is told what is to be remembered.
    remember: Callable[[str, Known], None]
    # Is told which blocks are this node's to keep from now on: they may be transient ones.
    adopt: Callable[[BlockSpace, Ids], None]
    # Is told that nothing is to be remembered any more.
    forget: Callable[[str], None] = lambda snapshot: None
    # What a node has said of the epochs of a group's job.
    settled: Callable[[str, Group], Settled] = lambda node, group: NOTHING_SETTLED
    # Do other nodes have copies go where this group reads them next?
    coordinated: Callable[[Group], bool] = lambda group: False
    # Have all other nodes got what is theirs to keep, since other members count?
    filled: Callable[[], bool] = lambda: False
