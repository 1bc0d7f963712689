"""One snapshot that jobs of the cluster read: the holders of its blocks, the blocks that this node keeps, and the reads
of other nodes here.

Copies go where they are read next, by the reads of all groups whose orders are known
(`cachefs.planning.cluster.moves`). One of the groups leads: holders are decided for one of its epochs after the other,
on all nodes alike, by the schedules that one node announces (`cachefs_cluster.placement.coordinator`). Where no group
leads, blocks stay where they are: at home, if none ever did.

A copy changes hands when its next holder reads it: that node counts the block as its own once the block is there,
shortly before the read, and the former holder stops doing so once it has given the block. To wait for the reader's
published progress instead would take room on both nodes for longer: 2 to 10 % more bytes from the origin, with epochs
of 5 to 20 s.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.errors import CachefsError, StoreFull
from cachefs.planning.blocks.presence import ABSENT
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.epoch_reads import FirstReads
from cachefs.planning.cluster.homes import NO_NODE, NodeCandidates
from cachefs.planning.cluster.ownership import OwnedMarks, owned_now
from cachefs.planning.cluster.scale import SnapshotDemand
from cachefs.planning.cluster.schedule import Announcement, EpochSchedule, ScheduledEpoch
from cachefs_cluster.placement.coordinator import Coordinator
from cachefs_cluster.placement.group_orders import Orders, is_epoch_known, published_samples
from cachefs_cluster.placement.group_reads import GroupReads
from cachefs_cluster.placement.group_samples import GroupSamples
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.holders import FORMER_HOLDER_SECONDS, Holders, HolderState, PlacementRing
from cachefs_cluster.placement.pending_handoffs import PendingHandoffs
from cachefs_cluster.placement.remote_group_reads import PassedReads, RemoteGroupReads
from cachefs_cluster.placement.remote_reads import RemoteReads
from cachefs_cluster.placement.snapshot_context import EpochPosition, SnapshotContext
from cachefs_daemon.jobs.plan_memory import BYTES_PER_READ, PlanPurpose

log = logging.getLogger(__name__)

# Bytes per block for homes, holders and reads of some epochs, and for the plan of remote reads.
PER_BLOCK: Final = 64
# Seconds until a retry after a failure.
RETRY_SECONDS: Final = 2.0
# Seconds within which readers publish their progress to a node that has just joined.
POSITIONS_SECONDS: Final = 5.0
# Seconds, besides those for which a read counts as near, by which a node counts a block as its own before reading it.
LEAD_SECONDS: Final = 0.25

# Epochs by which the readers of a group may be apart. Usually they go in step, and the holders follow from the position
# of the slowest. After one was cut off for a while and went on by itself, all looked in the wrong places, and a fifth
# of all blocks came from the origin (4 nodes, 5 epochs apart; with copies at home 4 %). The reads of a group that is
# further apart than MAX_SPREAD do not decide until the spread is at most REJOIN_SPREAD again.
MAX_SPREAD: Final = 2.0
REJOIN_SPREAD: Final = 1.0

# Reads of own consumers at which this node takes blocks over: epoch and number of the read, block, and the leader's
# epoch in which that was decided.
_AwaitedReads = npt.NDArray[np.void]
_NO_READS: Final[_AwaitedReads] = np.zeros(
    0, [("epoch", np.int64), ("read", np.int64), ("block", np.int32), ("decided", np.int32)]
)

_START_POSITION: Final = EpochPosition("", 0, 0.0, 0.0)


class SharedSnapshot:
    """Keeps holders and plans of one snapshot up to date in a task of its own. Used on the event loop."""

    def __init__(self, snapshot: str, ring: PlacementRing, context: SnapshotContext) -> None:
        self.snapshot = snapshot
        self.problem = ""
        self.holders: Holders | None = None
        self._context = context
        self._ring = ring
        self._groups: list[ConsumerGroup] = []
        self._samples = GroupSamples(context)
        self._remote_reads = RemoteReads(snapshot, context, lambda group: self._slowest_position(group).epoch)
        self._memory_key = ""  # account of the memory taken for the plan
        self._taken_over: dict[
            str, tuple[int, int]
        ] = {}  # by own consumer: epoch and read up to which `_take_over_blocks` has gone
        self._awaited: dict[str, _AwaitedReads] = {}  # by own consumer: reads whose blocks are on their way
        self._slowest_positions: dict[
            object, EpochPosition
        ] = {}  # by key of the group: its slowest consumer, as of the last step
        self._reads = GroupReads(context, self._samples)
        self._coordinator = Coordinator(
            context.me,
            context.positions_of,
            self._slowest_position,
            lambda: context.standing.copy_window + LEAD_SECONDS,
        )
        # Groups whose reads may decide, if their readers are not apart; None: not known yet.
        self._eligible: list[ConsumerGroup] | None = None
        self._apart: set[str] = set()  # digests of the groups whose readers are apart
        # Leadership by which copies are coordinated here: nodes that did not know of each other may have announced
        # different ones for the same term.
        self._leadership = _leadership_of(self._coordinator.announcement)
        self._leader: ConsumerGroup | None = None  # by whose epochs the holders are decided
        self._leader_position = _START_POSITION  # of its slowest consumer, also after its end
        self._decided_epoch = -1  # of the leader, at the latest decision
        self._was_hot = False  # whether nodes may have second copies
        self._has_second_copies = False  # whether this node's are marked
        self._is_ownership_exact = False  # whether standing is exact for all blocks, including those read in this epoch
        self._adopted: HolderState | None = None
        self._handoffs = PendingHandoffs(snapshot, context.me, context.standing, context.are_others_complete)
        self._wakeup = asyncio.Event()
        self._wakeup.set()
        self._is_busy = True
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._remote_reads.close()
        self._context.standing.forget_snapshot(self.snapshot)
        self._release_memory()

    @property
    def space(self) -> BlockSpace | None:
        """The blocks of the snapshot; None until the first samples are known."""
        return self._samples.space

    @property
    def has_readers(self) -> bool:
        """Whether any job reads the snapshot."""
        return bool(self._groups)

    @property
    def datasets(self) -> set[str]:
        """Names of the dataset by which jobs read the snapshot."""
        return {member.facts.dataset for group in self._groups for member in group.members}

    @property
    def is_hot(self) -> bool:
        """Whether the cluster makes second copies of the blocks. Without readers, it keeps those that it has."""
        return self._context.replicas > 1 and self._coordinator.announcement.is_hot

    @property
    def has_moved_copies(self) -> bool:
        """Whether copies may be elsewhere than at home."""
        return self.holders is not None and bool(self.holders.by_epoch)

    # --- events -------------------------------------------------------------------------------------------------------

    def set_groups(self, groups: list[ConsumerGroup]) -> None:
        """Set the groups that read the snapshot."""
        if groups != self._groups:
            self._groups = groups
            keys, digests = {group.key for group in groups}, {group.digest for group in groups}
            self._slowest_positions = {key: at for key, at in self._slowest_positions.items() if key in keys}
            self._apart &= digests
            self._wakeup.set()

    def set_ring(self, ring: PlacementRing) -> None:
        """Set the members that count for placement."""
        if ring != self._ring:
            self._ring = ring
            self._wakeup.set()

    def adopt_holders(self, known: HolderState) -> None:
        """Take over holders from another node, which knows better."""
        self._adopted = known
        self._wakeup.set()

    def offer_announcement(self, announcement: Announcement) -> None:
        """Follow an announcement that another node follows, if it ranks higher than this node's."""
        if self._coordinator.follow(announcement):
            self._publish_announcement()

    def note_handed_over(self, node: str, keys: Sequence[bytes]) -> None:
        """Record that a node got blocks from this one."""
        holders, space = self.holders, self.space
        if holders is None or space is None or node not in holders.ring.ids:
            return
        ids, number = space.ids(keys), holders.ring.ids.index(node)
        ids = np.unique(ids[ids >= 0])
        self._handoffs.release_blocks(ids, partial(self._will_keep, number))
        readers = [
            (group, reads) for group in self._groups if (reads := self._remote_reads.reads_of(group)) is not None
        ]
        if not readers:
            return
        found = [reads.find_reads(ids, number) for _, reads in readers]
        # The block serves the reader's next read of it, by whichever group.
        soonest = np.stack([seconds for _, seconds in found])
        chosen = np.where(np.isfinite(soonest.min(axis=0)), soonest.argmin(axis=0), -1)
        for index, (group, reads) in enumerate(readers):
            epochs = found[index][0]
            for epoch in np.unique(epochs[chosen == index]).tolist():
                blocks = ids[(chosen == index) & (epochs == epoch)]
                reads.note_handed_over(epoch, blocks)
                self._release_blocks(group, PassedReads(epoch, blocks, np.full(len(blocks), number, np.uint16)))

    def follow_readers(self) -> None:
        """Follow the progress of the readers. Call several times a second."""
        for group in self._groups:
            reads = self._remote_reads.reads_of(group)
            slowest = self._slowest_positions[group.key] = self._slowest_position(group)
            if reads is None:
                continue
            for passed in reads.follow_reader(slowest.epoch, slowest.done, slowest.rate):
                self._release_blocks(group, passed)
            if not self._is_planned(group, reads, slowest.epoch + 1):
                self._wakeup.set()
        self._follow_spread()
        self._coordinate()
        for group in self._deciding_groups():
            self._take_over_blocks(group)
        if self.is_up_to_date:
            self._handoffs.expire()

    def _coordinate(self) -> None:
        """Announce what has changed, where this node is the one that announces and knows which groups may decide."""
        if self._eligible is not None:
            self._announce_changes(self._eligible)
        leader = self._coordinator.find_leader(self._groups)
        if leader is not None:
            self._leader_position = self._slowest_position(leader)
            if self.holders is not None and self._leader_position.epoch > self._decided_epoch:
                self._wakeup.set()

    def _announce_changes(self, eligible: Sequence[ConsumerGroup]) -> None:
        ids = set(self._ring.ids)
        groups = [group for group in self._groups if group.nodes & ids]
        eligible = [group for group in eligible if group.digest not in self._apart and group.nodes & ids]
        sizes = {group.digest: self._samples.block_count(group) for group in eligible}
        if self._coordinator.issue(groups, eligible, sizes, self._block_reads()):
            self._publish_announcement()

    def _block_reads(self) -> float | None:
        """Return how often each block is read per second, by all groups together; None if unknown, or if it does not
        matter."""
        space = self.space
        if self._context.replicas < 2 or space is None or not space.count:
            return None
        # The rate of a consumer that has not begun its epoch is an assumption.
        paces = [
            max((at.rate for at in self._context.positions_of(group) if at.done > 0), default=0.0)
            * self._samples.block_count(group)
            for group in self._groups
        ]
        return sum(paces) / space.count or None

    def _publish_announcement(self) -> None:
        self._context.publish_announcement(self.snapshot, self._coordinator.announcement)
        self._wakeup.set()

    def _follow_spread(self) -> None:
        """Find the groups whose readers are too far apart for their reads to decide."""
        for group in self._groups:
            progress = [position.epoch + position.done for position in self._context.positions_of(group)]
            spread = max(progress) - min(progress) if progress else 0.0
            was_apart = group.digest in self._apart
            if (spread > (REJOIN_SPREAD if was_apart else MAX_SPREAD)) == was_apart:
                continue
            self._apart ^= {group.digest}
            what = "they are together again" if was_apart else "copies do not follow them until they are together again"
            log.info("snapshot %s: readers of job %s are %.1f epochs apart; %s", self.snapshot, group.job, spread, what)

    def _is_planned(self, group: ConsumerGroup, reads: RemoteGroupReads, epoch: int) -> bool:
        """Return whether the plan of that epoch is as complete as it can be."""
        return reads.is_current(epoch) or not is_epoch_known(group, epoch) or not self._is_decided(group, epoch)

    def _is_decided(self, group: ConsumerGroup, epoch: int) -> bool:
        """Return whether the holders at the start of that epoch are decided, as far as they have to be."""
        is_leader = self._leader is not None and group.key == self._leader.key
        return not is_leader or self.holders is None or epoch in self.holders.by_epoch

    def _deciding_groups(self) -> list[ConsumerGroup]:
        """Return the groups by whose reads copies change hands."""
        decisions = self.holders.decisions.values() if self.holders is not None else ()
        digests = {one.group for decision in decisions if decision is not None for one in decision.epochs}
        return [group for group in self._groups if group.digest in digests]

    @property
    def is_up_to_date(self) -> bool:
        """Whether all decisions that follow from known facts are made."""
        return not self._is_busy and not self._wakeup.is_set()

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def remote_read_keys(self) -> list[str]:
        """Names of remote reads in the plan."""
        return self._remote_reads.plan_names

    @property
    def leader(self) -> str:
        """Name of the job and loader that lead the decisions about copies; empty if there is none."""
        return self._leader.name if self._leader is not None else ""

    @property
    def announcement(self) -> Announcement:
        """The announcement that this node follows."""
        return self._coordinator.announcement

    def holders_of_block(self, block: int) -> tuple[int, tuple[int, ...], int]:
        """Return the holder of a block, other possible holders, and its home: places in the ring, or NO_NODE."""
        holders = self.holders
        assert holders is not None
        home = int(holders.homes[block])
        if not holders.by_epoch:
            return home, (), home
        epoch, done = self._position.epoch, self._position.done
        before, decision = holders.by_epoch.get(epoch), holders.decisions.get(epoch)
        if before is None:
            return home, (), home
        now, others = int(before[block]), list[int]()
        if decision is not None and (after := int(decision.moves.following[block])) != now:
            others.append(after)
            if decision.moves.times[block] < done:
                now, others = after, [now]
        # Another group may be a little later or earlier than scheduled at the read at which the block changes hands.
        others += [int(holders.by_epoch[one][block]) for one in (epoch - 1, epoch + 2) if one in holders.by_epoch]
        return now, tuple(dict.fromkeys(one for one in others if one != now)), home

    def former_holders(self, block: int) -> list[str]:
        """Return the ids of nodes that may have held a block before the ring changed; empty after a while."""
        former = self.holders.former if self.holders is not None else None
        if former is None or asyncio.get_running_loop().time() - former.changed_at > FORMER_HOLDER_SECONDS:
            return []
        numbers = dict.fromkeys(
            int(nodes[block]) for nodes in (*former.other_holders, *former.second_holders, former.holders)
        )
        return [former.ids[number] for number in numbers if number < len(former.ids)]

    def second_holders(self, block: int) -> list[int]:
        """Return the current or next keepers of the second copy of a block, as places in the ring; empty if the
        snapshot has not been hot."""
        assert self.holders is not None
        if not self._was_hot:
            return []
        found = self.holders.second_holders(self._position.epoch, np.array([block], np.int32))
        return [number for nodes in found if (number := int(nodes[0])) != NO_NODE]

    def nodes_with(self, blocks: Ids) -> list[NodeCandidates]:
        """Return the nodes that may have these blocks: holders now and in the next epoch, and homes."""
        holders, epoch = self.holders, self._position.epoch
        assert holders is not None
        decided = [at for one in (epoch, epoch + 1) if (at := holders.by_epoch.get(one)) is not None]
        return [NodeCandidates(holders.ring.ids, nodes[blocks]) for nodes in (*decided, holders.homes)]

    def demand_of_groups(self) -> SnapshotDemand:
        """Return the demand of all groups together."""
        size = max((self._samples.bytes_of_blocks(group) for group in self._groups), default=0)
        positions = [(group, self._slowest_position(group)) for group in self._groups]
        left = [group.spec.epochs - at.epoch - at.done if group.spec else math.inf for group, at in positions]
        rate = max((at.rate for _, at in positions), default=0.0)
        return SnapshotDemand(size, max(0.0, *left, 0.0), 1 / rate if rate > 0 else 0.0)

    def holder_state(self) -> HolderState | None:
        """Return the holders, for other nodes; None if blocks are at home."""
        return self.holders.state_at(self._position.epoch) if self.holders is not None else None

    @property
    def _position(self) -> EpochPosition:
        """The leader's position, of its slowest consumer; the start where none leads."""
        return self._leader_position if self.holders is not None and self.holders.leader else _START_POSITION

    def _slowest_position(self, group: ConsumerGroup) -> EpochPosition:
        group = next((one for one in self._groups if one.key == group.key), group)  # some members may have ended
        positions = self._context.positions_of(group)
        published_epochs = (order.epoch for member in group.members for order in member.facts.orders)
        begun = min(published_epochs, default=0) if group.spec is None else 0
        if not positions:
            # Consumers that have ended are where they were last.
            last = self._slowest_positions.get(group.key, _START_POSITION)
            return last if last.epoch >= begun else EpochPosition("", begun, 0.0, 0.0)
        slowest = min(positions, key=lambda position: (position.epoch, position.done))
        if slowest.epoch < begun:  # its last progress is older than its orders
            slowest = EpochPosition(slowest.node, begun, 0.0, 0.0)
        return slowest._replace(rate=max(position.rate for position in positions))

    # --- copies change hands ------------------------------------------------------------------------------------------

    def _release_blocks(self, group: ConsumerGroup, passed: PassedReads) -> None:
        """Update standing after another node has read blocks, or was given them for a read: where it keeps them from
        then on, this node does not."""
        holders, me = self.holders, self._me
        if holders is None or not len(passed.blocks):
            return
        for number, decision in holders.decisions.items():
            if decision is None:
                continue
            takes = decision.takes_over(group.digest, passed.epoch, passed.blocks)
            takes &= decision.moves.following[passed.blocks] == passed.readers
            takes &= passed.readers != me
            # A group that lags behind its schedule may do reads after this node has taken the block in a later epoch.
            takes &= self._taken_in[passed.blocks] <= number
            blocks = passed.blocks[takes]
            if len(blocks):
                self._context.standing.update_owned(self.snapshot, blocks, False)

    def _take_over_blocks(self, group: ConsumerGroup) -> None:
        """Count blocks that this node reads next, and then keeps, as its own as soon as they are here. Blocks that are
        on their way are copies until then: they would count as missing ones, be fetched at once, and displace own
        blocks that no other node has."""
        plan, standing, me = self._context.plan, self._context.standing, self._me
        states = self._context.states_of(self.snapshot)
        if me == NO_NODE or states is None:
            return
        for key in self._context.own_keys(group):
            window = plan.window(key, 0, 1)
            if window is None:
                continue
            current, position = plan.progress(key)
            left = position + int((standing.copy_window + LEAD_SECONDS) / window.period) + 1
            led = max(self._taken_over.get(key, (current, position)), (current, position))
            awaited = [self._awaited.get(key, _NO_READS)]
            for epoch in (current, current + 1):
                published = plan.epoch(key, epoch)
                if published is None or left <= 0:
                    break
                begin = led[1] if led[0] == epoch else 0
                blocks = published.blocks[begin:left]
                if led[0] <= epoch and len(blocks):
                    awaited.append(self._reads_taking_over(group, epoch, begin, blocks))
                    led = (epoch, begin + len(blocks))
                left -= len(published.blocks)
            self._taken_over[key] = led
            reads = np.concatenate(awaited)
            is_read = (reads["epoch"] < current) | ((reads["epoch"] == current) & (reads["read"] < position))
            due = is_read | (states[reads["block"]] != ABSENT)
            self._awaited[key] = reads[~due]
            self._taken_in[reads["block"][due]] = reads["decided"][due]
            self._gain_blocks(reads["block"][due])

    def _reads_taking_over(self, group: ConsumerGroup, epoch: int, first: int, blocks: Ids) -> _AwaitedReads:
        """Return the reads of *blocks*, from read *first* of an epoch of a group on, from which on this node keeps the
        blocks."""
        found = [_NO_READS]
        for number, decision in self.holders.decisions.items() if self.holders is not None else ():
            if decision is not None:
                takes = decision.takes_over(group.digest, epoch, blocks)
                reads = np.flatnonzero(takes & (decision.moves.following[blocks] == self._me))
                taken = np.empty(len(reads), _NO_READS.dtype)
                taken["epoch"], taken["read"], taken["decided"] = epoch, first + reads, number
                taken["block"] = blocks[reads]
                found.append(taken)
        return np.concatenate(found)

    def _gain_blocks(self, blocks: Ids) -> None:
        marks, space = self._context.standing.owned.get(self.snapshot), self.space
        if marks is None or space is None:
            return
        gained = blocks[~marks[blocks]]
        if len(gained):
            self._context.standing.update_owned(self.snapshot, gained, True)
            self._context.adopt_blocks(space, gained)

    @property
    def _me(self) -> int:
        ids = self.holders.ring.ids if self.holders is not None else ()
        return ids.index(self._context.me) if self._context.me in ids else NO_NODE

    def _will_keep(self, node: int, ids: Ids) -> OwnedMarks:
        """Return which of these blocks the node keeps, or will in the next epoch: shape (n,), bool."""
        holders, epoch = self.holders, self._position.epoch
        assert holders is not None
        kept: OwnedMarks = holders.kept_blocks(epoch, node, ids) | holders.kept_blocks(epoch + 1, node, ids)
        return kept

    # --- decisions, in a task -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._is_busy = False
            await self._wakeup.wait()
            self._is_busy = True
            self._wakeup.clear()
            pause = RETRY_SECONDS
            try:
                if await self._recompute():
                    pause, self.problem = 0.0, ""
            except StoreFull as error:
                self._note_problem(f"the reads of other nodes are not planned: {error}")
            except CachefsError as error:
                self._note_problem(f"the reads of other nodes are not known yet: {error}")
            except Exception as error:
                log.exception("the shared snapshot %s could not be updated", self.snapshot)
                self.problem = f"internal error ({error!r})"
            if pause:
                await asyncio.sleep(pause)
                self._wakeup.set()

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("snapshot %s: %s", self.snapshot, problem)

    async def _recompute(self) -> bool:
        """Recompute all decisions. Returns False if a retry is needed. Raises CachefsError."""
        around, all_groups = self._context, list(self._groups)
        groups, space = await self._samples.load(all_groups), self.space
        if self._samples.problem:
            self._note_problem(self._samples.problem)
        if space is None:
            return False
        if self.holders is None:
            self.holders = Holders(space, around.replicas, around.threads)
            self._taken_in = np.full(space.count, -1, np.int32)
        holders = self.holders
        self._reserve_memory(space, groups)
        if around.plan.spaces.get(self.snapshot) is not space:
            around.plan.add_space(space)
        self._eligible = [group for group in groups if self._is_eligible(group)]
        former = holders.former
        changed = await holders.follow_ring(self._ring, self._position.epoch, self._position.done)
        if holders.former is not None and holders.former is not former:
            self._handoffs.add_handoffs(holders.former)
        changed |= await self._follow_leader(holders, space)
        is_new, self._is_order_missing = False, False
        if self._leader is not None:
            epoch = self._decided_epoch = self._position.epoch
            deciding = {group.digest for group in self._deciding_groups()}
            is_new = await holders.decide_epochs(epoch, self._coordinator.announcement.schedule_of, self._load_reads)
            if is_new:
                self._taken_over, self._awaited = {}, {}
                if len(self._deciding_groups()) > 1:
                    self._remote_reads.mark_outdated()
                if not deciding <= {group.digest for group in self._deciding_groups()}:
                    # A group has ended: copies that were to go where it reads them may be where they were.
                    holders.remember_holders(epoch, self._position.done)
            if is_new or changed:
                changed |= not self._is_ownership_exact
                if (known := holders.state_at(epoch)) is not None:
                    around.store_holders(self.snapshot, known)
        if changed:
            self._remote_reads.mark_outdated()
        await self._remote_reads.plan_reads(groups, space, holders.ring.ids, self._kept_in)
        if changed or self.snapshot not in around.standing.owned:
            await self._set_ownership(holders)
        if self.is_hot != self._has_second_copies or (self.is_hot and (changed or is_new)):
            await self._mark_second_copies(holders)
        if holders.ring != self._ring or all_groups != self._groups:
            self._wakeup.set()
        return not self._is_order_missing and len(groups) == len(all_groups)

    def _release_memory(self) -> None:
        if self._memory_key:
            self._context.plan_memory.release_consumer(self._memory_key)
        self._memory_key = ""

    def _reserve_memory(self, space: BlockSpace, groups: Sequence[ConsumerGroup]) -> None:
        """Reserve memory on the account of the first job, or of another one after its end. Raises StoreFull."""
        key = f"{groups[0].job if groups else ''}/peers {self.snapshot}"
        if key != self._memory_key:
            self._release_memory()
            self._memory_key = key
        size = PER_BLOCK * space.count + self._samples.memory + self._reads.memory
        size += BYTES_PER_READ * self._remote_reads.longest_reads
        self._context.plan_memory.reserve(key, PlanPurpose.PLAN, size)

    def _is_eligible(self, group: ConsumerGroup) -> bool:
        """Return whether the reads of a group may decide: all its consumers are known, or were, as when a rank ends
        before the others or its node is away; and it publishes whole epochs."""
        schedules = self._coordinator.announcement.schedules
        decides = any(schedule.timing_of(group.digest) is not None for schedule in schedules)
        return (group.is_whole or decides) and (decides or self._has_whole_epochs(group))

    async def _follow_leader(self, holders: Holders, space: BlockSpace) -> bool:
        """Follow a change of the leader as announced, and other nodes' holders. Returns whether what this node keeps is
        to be computed anew: where another group leads from now on, copies stay where they are."""
        announcement, adopted = self._coordinator.announcement, self._adopted
        leadership = _leadership_of(announcement)
        leader = self._coordinator.find_leader(self._groups) if holders.ring.is_known else None
        self._adopted = None
        if adopted is not None and adopted.job != holders.leader:
            adopted = None
        if leadership == self._leadership and adopted is None:
            self._leader = leader if leader is not None else self._leader
            return False
        stops = leadership != self._leadership and bool(holders.leader)
        if stops:
            self._taken_in[:] = -1
            epoch, done = divmod(announcement.left_at, 1.0)
            holders.stop_coordination(int(epoch), done)
            self._leader = None
            self._remote_reads.mark_outdated()
        if not announcement.leader:
            self._leadership = leadership
        if leader is None:
            return False
        goes_on = bool(holders.by_epoch) and adopted is None
        known = adopted or (await self._context.load_holders(space) if not holders.by_epoch else None)
        if known is not None and adopted is None and known.job == announcement.leader:
            await self._wait_for_positions(leader, known.epoch)
        positions = [position.epoch for position in self._context.positions_of(leader)]
        self._leader, self._leader_position = leader, self._slowest_position(leader)
        self._leadership = leadership
        first = announcement.first_epoch if goes_on else self._leader_position.epoch
        await holders.start_coordination(leader.name, first, max(positions, default=first), known)
        log.info(
            "snapshot %s: copies go where they are read next, by the epochs of job %s from %d on",
            self.snapshot, leader.job, min(holders.by_epoch),
        )  # fmt: skip
        return not goes_on

    async def _wait_for_positions(self, group: ConsumerGroup, epoch: int) -> None:
        """Wait until a consumer is known to be in that epoch or about to begin it, for at most POSITIONS_SECONDS:
        progress is sent only to nodes that have asked for it."""
        until = asyncio.get_running_loop().time() + POSITIONS_SECONDS
        while asyncio.get_running_loop().time() < until:
            if max((position.epoch for position in self._context.positions_of(group)), default=-1) + 1 >= epoch:
                return
            await asyncio.sleep(0.05)

    def _has_whole_epochs(self, group: ConsumerGroup) -> bool:
        """Return whether the group publishes whole epochs. Orders that are published as they are drawn come in small
        parts, which do not tell when a block is read again."""
        if group.spec is not None:
            return True
        epochs = {order.epoch for member in group.members for order in member.facts.orders}
        samples = self._samples.sample_count(group)
        return any(is_epoch_known(group, epoch) and 2 * published_samples(group, epoch) >= samples for epoch in epochs)

    async def _load_reads(
        self, schedule: EpochSchedule, epochs: Sequence[ScheduledEpoch], ids: tuple[str, ...]
    ) -> Sequence[FirstReads] | None:
        groups = {group.digest: group for group in self._groups}
        try:
            return await self._reads.load_reads(groups, schedule, epochs, ids)
        except CachefsError as error:
            self._note_missing_order(error)
            return None

    def _note_missing_order(self, error: CachefsError) -> None:
        self._is_order_missing = True
        self._note_problem(f"the order of some reads is not known yet: {error}")

    async def _kept_in(self, group: ConsumerGroup, epoch: int) -> tuple[OwnedMarks, Orders] | None:
        """Return which blocks this node keeps in an epoch until they are read, shape (blocks,), bool, and the orders of
        all members. None if unknown or undecided. Raises CachefsError."""
        holders, planning = self.holders, self._context.threads.planning
        assert holders is not None
        if not self._is_decided(group, epoch):
            return None
        try:
            orders = await self._reads.load_orders(group, epoch)
            if orders is None:
                return None
            if len(self._deciding_groups()) > 1:
                reads = await self._reads.load_epoch(group, epoch, holders.ring.ids)
                if reads is None:
                    return None
                kept = await planning(holders.kept_until_read, group.digest, epoch, reads, self._me)
            else:
                # The reads of groups that do not decide have been where they are since the first decision.
                is_leader = self._leader is not None and group.key == self._leader.key
                decided = epoch if is_leader else min(holders.by_epoch, default=0)
                kept = await planning(holders.kept_blocks, decided, self._me)
        except CachefsError as error:
            if group.spec is not None:
                raise
            self._note_missing_order(error)
            return None
        return kept, orders

    async def _set_ownership(self, holders: Holders) -> None:
        """Set for all blocks whether this node keeps them."""
        leader, me = self._leader, self._me
        epoch = self._position.epoch
        at, decision = holders.by_epoch.get(epoch), holders.decisions.get(epoch)
        self._is_ownership_exact = leader is None or (decision is not None and me != NO_NODE)
        if at is not None and decision is not None and leader is not None and me != NO_NODE:
            passed = _progress_by_node(holders.ring.ids, self._context.positions_of(leader), self._position)
            mine = await self._context.threads.planning(owned_now, at, decision.moves, passed, me)
        else:
            mine = await self._context.threads.planning(holders.kept_blocks, epoch, me)
        before = self._context.standing.owned.get(self.snapshot)
        gained = mine if before is None else mine & ~before
        self._handoffs.set_kept(mine)
        if self.space is not None and gained.any():
            self._context.adopt_blocks(self.space, np.flatnonzero(gained).astype(np.int32))
        self._taken_over, self._awaited = {}, {}
        for group in self._deciding_groups():
            self._take_over_blocks(group)

    async def _mark_second_copies(self, holders: Holders) -> None:
        """Mark the blocks of which this node keeps the second copy. They change with each epoch of the leader; other
        blocks change hands read by read."""
        is_hot, marks = self.is_hot, None
        if is_hot:
            marks = await self._context.threads.planning(holders.has_second_copy, self._position.epoch, self._me)
        if is_hot != self._has_second_copies:
            why = "second copies are made of its blocks" if is_hot else "it has no second copies any more"
            pace = "more" if is_hot else "less"
            log.info("snapshot %s is read %s often than pays for second copies: %s", self.snapshot, pace, why)
        self._has_second_copies = is_hot
        self._was_hot |= is_hot
        self._context.standing.set_second_copies(self.snapshot, marks)


def _leadership_of(announcement: Announcement) -> tuple[int, str, int, float]:
    return announcement.term, announcement.leader, announcement.first_epoch, announcement.left_at


def _progress_by_node(
    ids: Sequence[str], positions: Sequence[EpochPosition], slowest: EpochPosition
) -> npt.NDArray[np.float64]:
    """Return the progress of each node in the epoch of the leader's slowest consumer, by its own slowest one: 0 to 1,
    or 2 if beyond it. Nodes without a consumer of the leader count as being with the slowest. Shape (nodes,)."""
    passed = np.full(len(ids), slowest.done)
    by_node: dict[str, tuple[int, float]] = {}
    for position in positions:
        by_node[position.node] = min(by_node.get(position.node, (position.epoch, position.done)), position[1:3])
    for number, node in enumerate(ids):
        if node in by_node:
            at_epoch, done = by_node[node]
            passed[number] = done if at_epoch == slowest.epoch else 2.0 * (at_epoch > slowest.epoch)
    return passed
