"""One snapshot that jobs of the cluster read: the holders of its blocks, the blocks that this node keeps, and the reads
of other nodes here.

If one group of consumers shares out samples that no other group reads, its copies are coordinated: they go where they
are read next (`cachefs.planning.cluster.copies`). Otherwise blocks stay at home. A copy changes hands when its next
holder reads it: that node counts the block as its own from shortly before the read, and the former holder stops doing
so once it has given the block. To wait for the reader's published progress instead would take room on both nodes for
longer: 2 to 10 % more bytes from the origin, with epochs of 5 to 20 s.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.errors import CachefsError, StoreFull
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.copies import FirstReads
from cachefs.planning.cluster.homes import NO_NODE
from cachefs.planning.cluster.ownership import OwnedMarks, owned_now
from cachefs.planning.cluster.scale import SnapshotDemand
from cachefs_cluster.placement.coordinating_group import choose_coordinator
from cachefs_cluster.placement.group_orders import Orders, is_epoch_known, is_shared_out, published_samples
from cachefs_cluster.placement.group_samples import GroupSamples
from cachefs_cluster.placement.groups import ConsumerGroup
from cachefs_cluster.placement.holders import FORMER_HOLDER_SECONDS, Holders, HolderState, LoadReads, PlacementRing
from cachefs_cluster.placement.pending_handoffs import PendingHandoffs
from cachefs_cluster.placement.remote_group_reads import RemoteGroupReads
from cachefs_cluster.placement.remote_reads import RemoteReads
from cachefs_cluster.placement.snapshot_context import EpochPosition, SnapshotContext
from cachefs_cluster.placement.timeliness import own_verdict, verdict_of
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


# Epochs by which the readers of a job may be apart. Usually they go in step, and the holders follow from the position
# of the slowest. After one was cut off for a while and went on by itself, all looked in the wrong places, and a fifth
# of all blocks came from the origin (4 nodes, 5 epochs apart; with copies at home 4 %). Beyond MAX_SPREAD, copies stay
# at home until the spread is at most REJOIN_SPREAD again.
MAX_SPREAD: Final = 2.0
REJOIN_SPREAD: Final = 1.0
# Fraction of an epoch after which it counts as begun.
BEGUN_FRACTION: Final = 0.01


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
        self._slowest_positions: dict[
            object, EpochPosition
        ] = {}  # by key of the group: its slowest consumer, as of the last step
        self._coordinated: ConsumerGroup | None = None
        self._was_spread = False  # whether copies stayed at home because the readers were apart
        self._spread_group: object = None  # key of the group whose readers are too far apart to coordinate copies
        self._is_ownership_exact = False  # whether standing is exact for all blocks, including those read in this epoch
        self._adopted: HolderState | None = None
        self._is_order_missing = False  # whether a published order could not be fetched at the last attempt
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

    # --- events -------------------------------------------------------------------------------------------------------

    def set_groups(self, groups: list[ConsumerGroup]) -> None:
        """Set the groups that read the snapshot."""
        if groups != self._groups:
            self._groups = groups
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

    def note_handed_over(self, node: str, keys: Sequence[bytes]) -> None:
        """Record that a node got blocks from this one."""
        holders, space = self.holders, self.space
        if holders is None or space is None or node not in holders.ring.ids:
            return
        ids, number = space.ids(keys), holders.ring.ids.index(node)
        ids = np.unique(ids[ids >= 0])
        self._handoffs.release_blocks(ids, partial(self._will_keep, number))
        reader = self._remote_reads.reads_of(self._coordinated) if self._coordinated is not None else None
        if reader is not None:
            for epoch, blocks in reader.note_handed_over(ids, number):
                self._release_blocks(epoch, blocks)

    def follow_readers(self) -> None:
        """Follow the progress of the readers. Call several times a second."""
        for group in self._groups:
            reader = self._remote_reads.reads_of(group)
            slowest = self._slowest_positions[group.key] = self._slowest_position(group)
            if reader is None:
                continue
            for epoch, blocks in reader.follow_reader(slowest.epoch, slowest.done, slowest.rate):
                if self._coordinated is not None and group.key == self._coordinated.key:
                    self._release_blocks(epoch, blocks)
            following = slowest.epoch + 1
            if self._is_decided(group, following) and not self._is_planned(group, reader, following):
                self._wakeup.set()
        self._check_spread()
        if self._coordinated is not None:
            self._take_over_blocks(self._coordinated)
        if self.is_up_to_date:
            self._handoffs.expire()

    def _check_spread(self) -> None:
        """Check the spread of the readers: of the group that coordinates copies, would do so if it were together, or is
        the only one."""
        alone = self._groups[0] if len(self._groups) == 1 else None
        group = self._coordinated or next((one for one in self._groups if one.key == self._spread_group), alone)
        positions = self._context.positions_of(group) if group is not None else []
        progress = [position.epoch + position.done for position in positions]
        spread = max(progress) - min(progress) if progress else 0.0
        was_apart = self._spread_group is not None
        is_apart = spread > (REJOIN_SPREAD if was_apart else MAX_SPREAD)
        self._spread_group = group.key if is_apart and group is not None else None
        if is_apart != was_apart and group is not None:
            self._wakeup.set()
            what = "blocks stay at home until they are together again" if is_apart else "they are together again"
            log.info("snapshot %s: readers of job %s are %.1f epochs apart; %s", self.snapshot, group.job, spread, what)

    def _is_planned(self, group: ConsumerGroup, reader: RemoteGroupReads, epoch: int) -> bool:
        """Return whether the plan of that epoch is as complete as it can be."""
        is_open = group.spec is None and self._coordinated is not None and group.key == self._coordinated.key
        if is_open and self.holders is not None and epoch not in self.holders.by_epoch:
            return False
        return reader.is_current(epoch) or not is_epoch_known(group, epoch)

    def _is_decided(self, group: ConsumerGroup, epoch: int) -> bool:
        """Return whether the holders at the start of that epoch are decided, or can be by now."""
        if self._coordinated is None or group.key != self._coordinated.key or group.spec is not None:
            return True
        if self.holders is not None and epoch in self.holders.by_epoch:
            return True
        verdict = self._verdict(group, epoch - 1)
        return verdict is not None and (
            not verdict or (is_epoch_known(group, epoch - 1) and is_epoch_known(group, epoch))
        )

    def _verdict(self, group: ConsumerGroup, epoch: int) -> bool | None:
        """Return whether copies change hands in an epoch of a group that publishes orders one by one; None if open."""
        around, ring = self._context, self._ring.ids
        first = min((node for node in group.nodes if node in ring), default=around.me)
        if first != around.me:
            return verdict_of(epoch, around.settled_epochs(first, group), self._slowest_position(group)[1:3])
        own = [position[1:3] for position in around.positions_of(group) if position.node == around.me]
        return own_verdict(epoch, max(self._slowest_position(group)[1:3], min(own, default=(0, 0.0))))

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
    def coordinator(self) -> str:
        """Name of the group that coordinates copies; empty if there is none."""
        return self._coordinated.name if self._coordinated is not None else ""

    def holders_of_block(self, block: int) -> tuple[int, tuple[int, ...], int]:
        """Return the holder of a block, other possible holders, and its home: places in the ring, or NO_NODE."""
        holders = self.holders
        assert holders is not None
        home = int(holders.homes[block])
        if self._coordinated is None or not holders.by_epoch:
            return home, (), home
        epoch, done = self._position.epoch, self._position.done
        before, after, reads = holders.by_epoch.get(epoch), holders.by_epoch.get(epoch + 1), holders.reads.get(epoch)
        if before is None:
            return home, (), home
        now, others = int(before[block]), tuple[int, ...]()
        if after is not None and after[block] != now:
            others = (int(after[block]),)
            if reads is not None and reads.positions is not None and reads.positions[block] < done:
                now, others = others[0], (now,)
        return now, others, home

    def former_holders(self, block: int) -> list[str]:
        """Return the ids of nodes that may have held a block before the ring changed; empty after a while."""
        former = self.holders.former if self.holders is not None else None
        if former is None or asyncio.get_running_loop().time() - former.changed_at > FORMER_HOLDER_SECONDS:
            return []
        numbers = dict.fromkeys(int(nodes[block]) for nodes in (*former.other_holders, former.holders))
        return [former.ids[number] for number in numbers if number < len(former.ids)]

    def second_holders(self, block: int) -> list[int]:
        """Return the current or next keepers of the second copy of a block, as places in the ring."""
        assert self.holders is not None
        found = self.holders.second_holders(self._position.epoch, np.array([block], np.int32))
        return [number for nodes in found if (number := int(nodes[0])) != NO_NODE]

    def demand_of_groups(self) -> SnapshotDemand:
        """Return the demand of all groups together."""
        size = max((self._samples.bytes_of_blocks(group) for group in self._groups), default=0)
        positions = [(group, self._slowest_position(group)) for group in self._groups]
        left = [group.spec.epochs - at.epoch - at.done if group.spec else math.inf for group, at in positions]
        rate = max((at.rate for _, at in positions), default=0.0)
        return SnapshotDemand(size, max(0.0, *left, 0.0), 1 / rate if rate > 0 else 0.0)

    def holder_state(self) -> HolderState | None:
        """Return the holders, for other nodes; None if no job coordinates copies."""
        return (
            self.holders.state_at(self._position.epoch)
            if self.holders is not None and self._coordinated is not None
            else None
        )

    @property
    def _position(self) -> EpochPosition:
        return (
            self._slowest_positions.get(self._coordinated.key, _START_POSITION)
            if self._coordinated is not None
            else _START_POSITION
        )

    def _slowest_position(self, group: ConsumerGroup) -> EpochPosition:
        group = next((one for one in self._groups if one.key == group.key), group)  # some members may have ended
        positions = self._context.positions_of(group)
        published_epochs = (order.epoch for member in group.members for order in member.facts.orders)
        begun = min(published_epochs, default=0) if group.spec is None else 0
        if not positions:
            return EpochPosition("", begun, 0.0, 0.0)
        slowest = min(positions, key=lambda position: (position.epoch, position.done))
        if slowest.epoch < begun:  # its last progress is older than its orders
            slowest = EpochPosition(slowest.node, begun, 0.0, 0.0)
        return slowest._replace(rate=max(position.rate for position in positions))

    # --- copies change hands ------------------------------------------------------------------------------------------

    def _release_blocks(self, epoch: int, blocks: Ids) -> None:
        """Update standing after blocks were read by other nodes, or given to them, in *epoch*: another node may keep
        them from then on."""
        holders = self.holders
        following = holders.by_epoch.get(epoch + 1) if holders is not None else None
        if holders is None or following is None or not len(blocks):
            return
        me = self._me
        mine = (following[blocks] == me) | holders.has_second_copy(epoch + 1, me, blocks)
        self._context.standing.update_owned(self.snapshot, blocks, mine & (me != NO_NODE))

    def _take_over_blocks(self, group: ConsumerGroup) -> None:
        """Count blocks that this node reads next, and then keeps, as its own from now on."""
        plan, standing, holders, me = self._context.plan, self._context.standing, self.holders, self._me
        if holders is None or me == NO_NODE:
            return
        for key in self._context.own_keys(group):
            window = plan.window(key, 0, 1)
            if window is None:
                continue
            current, position = plan.progress(key)
            left = position + int((standing.copy_window + LEAD_SECONDS) / window.period) + 1
            led = max(self._taken_over.get(key, (current, position)), (current, position))
            for epoch in (current, current + 1):
                published, following = plan.epoch(key, epoch), holders.by_epoch.get(epoch + 1)
                if published is None or following is None or left <= 0:
                    break
                begin = led[1] if led[0] == epoch else 0
                blocks = published.blocks[begin:left]
                if led[0] <= epoch and len(blocks):
                    self._gain_blocks(blocks[following[blocks] == me])
                    led = (epoch, begin + len(blocks))
                left -= len(published.blocks)
            self._taken_over[key] = led

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
        around, groups = self._context, list(self._groups)
        is_known, space = await self._samples.load(groups), self.space
        if not is_known or space is None:
            return False
        if self.holders is None:
            self.holders = Holders(space, around.replicas, around.threads)
        holders = self.holders
        self._reserve_memory(space, groups)
        if around.plan.spaces.get(self.snapshot) is not space:
            around.plan.add_space(space)
        position = self._position
        former = holders.former
        changed = await holders.follow_ring(self._ring, position.epoch, position.done)
        if holders.former is not None and holders.former is not former:
            self._handoffs.add_handoffs(holders.former)
        changed |= await self._coordinate(holders, space, groups)
        coordinated, stands_anew, self._is_order_missing = self._coordinated, False, False
        if coordinated is not None:
            epoch = self._slowest_position(coordinated).epoch
            verdict = partial(self._verdict, coordinated) if coordinated.spec is None else None
            if (is_new := await holders.decide_epochs(epoch, self._reads_loader(coordinated), verdict)) or changed:
                # Keepers of second copies change with each epoch; other blocks change hands read by read.
                stands_anew = is_new and around.replicas > 1
                changed |= not self._is_ownership_exact
                if (known := holders.state_at(epoch)) is not None:
                    around.store_holders(self.snapshot, known)
        if changed:
            self._remote_reads.mark_outdated()
        await self._remote_reads.plan_reads(groups, space, holders.ring.ids, self._kept_in)
        if changed or stands_anew or self.snapshot not in around.standing.owned:
            await self._set_ownership(holders)
        if holders.ring != self._ring or groups != self._groups:
            self._wakeup.set()
        return not self._is_order_missing

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
        size = PER_BLOCK * space.count + self._samples.memory + BYTES_PER_READ * self._remote_reads.longest_reads
        self._context.plan_memory.reserve(key, PlanPurpose.PLAN, size)

    async def _coordinate(self, holders: Holders, space: BlockSpace, groups: list[ConsumerGroup]) -> bool:
        """Choose the group that decides where copies go, if any. Returns whether the holders have changed."""
        before = self._coordinated
        # When a rank ends before the others, or its node is away, the copies of the others stay where the sequences
        # have them; a node that comes back meanwhile joins in.
        elsewhere = {one.key for one in groups if self._context.is_coordinated_elsewhere(one)}
        last = before.key if before is not None else None
        group = await self._context.threads.planning(choose_coordinator, groups, self._samples.extents, last, elsewhere)
        goes_on = group is not None and (group.key == last or group.key in elsewhere)
        is_apart = group is not None and group.key == self._spread_group
        if group is None or is_apart or not holders.ring.is_known or not (goes_on or self._has_whole_epochs(group)):
            self._was_spread = is_apart
            if before is not None:
                position = self._position
                holders.return_home(position.epoch, position.done)
                self._context.remove_holders(self.snapshot)
            self._coordinated, self._adopted = None, None
            return before is not None
        adopted, self._adopted = self._adopted, None
        if before is not None and before.name == group.name and adopted is None:
            self._coordinated = group
            position = self._slowest_position(group)
            if before.key != group.key:
                # The last sampler's order of the current epoch is not what is read.
                holders.discard_decisions(position.epoch)
                return True
            if before.reader_ids != group.reader_ids:
                # Blocks already read have changed hands as decided.
                holders.discard_decisions(position.epoch + (position.done > BEGUN_FRACTION))
                return True
            return False
        # After readers were apart no node knows better, since all copies have gone home meanwhile.
        known = adopted or (await self._context.load_holders(space) if not self._was_spread else None)
        self._was_spread = False
        if (
            adopted is None
            and known is not None
            and known.job == group.name
            and self._context.is_coordinated_elsewhere(group)
        ):
            await self._wait_for_positions(group, known.epoch)
        positions = [position.epoch for position in self._context.positions_of(group)]
        slowest = self._slowest_position(group).epoch
        await holders.start_coordination(group.name, slowest, max(positions, default=slowest), known)
        self._coordinated = group
        log.info(
            "snapshot %s: copies go where job %s reads them next, from epoch %d on",
            self.snapshot, group.job, min(holders.by_epoch),
        )  # fmt: skip
        return True

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

    def _reads_loader(self, group: ConsumerGroup) -> LoadReads:
        async def reads_of(epoch: int, ids: tuple[str, ...]) -> FirstReads | None:
            orders = await self._orders(group, epoch)
            if orders is None:
                return None
            shared_out = group.spec is not None or await self._context.threads.planning(is_shared_out, orders)
            count = self._samples.by_map[group.maps[0]].space.count
            return await self._context.threads.planning(_load_reads, count, orders if shared_out else [], ids)

        return reads_of

    async def _orders(self, group: ConsumerGroup, epoch: int) -> Orders | None:
        """Return the orders of an epoch; None if unknown. Raises CachefsError."""
        if not is_epoch_known(group, epoch):
            return None
        try:
            return await self._context.orders.orders_of(group, self._samples.by_map, epoch)
        except CachefsError as error:
            if group.spec is not None:
                raise
            self._is_order_missing = True
            self._note_problem(f"the reads of other nodes in epoch {epoch} are not known yet: {error}")
            return None

    async def _kept_in(self, group: ConsumerGroup, epoch: int) -> tuple[OwnedMarks, Orders] | None:
        """Return which blocks this node keeps in an epoch until they are read, shape (blocks,), bool, and the orders of
        all members. None if unknown or undecided. Raises CachefsError."""
        holders, decided = self.holders, epoch
        assert holders is not None
        if self._coordinated is not None and holders.by_epoch:
            if group.key != self._coordinated.key:
                decided = min(holders.by_epoch)  # the reads of other groups have been where they are since then
            if decided not in holders.by_epoch:
                return None
        kept = await self._context.threads.planning(holders.kept_blocks, decided, self._me)
        orders = await self._orders(group, epoch)
        return (kept, orders) if orders is not None else None

    async def _set_ownership(self, holders: Holders) -> None:
        """Set for all blocks whether this node keeps them."""
        group, me = self._coordinated, self._me
        self._is_ownership_exact = False
        epoch = self._slowest_position(group).epoch if group is not None else 0
        mine = await self._context.threads.planning(holders.kept_blocks, epoch, me)
        if group is not None:
            at, following, reads = (
                holders.by_epoch.get(epoch),
                holders.by_epoch.get(epoch + 1),
                holders.reads.get(epoch),
            )
            if at is not None and following is not None and reads is not None and me != NO_NODE:
                passed = _progress_by_node(holders.ring.ids, self._context.positions_of(group), epoch)
                mine = await self._context.threads.planning(owned_now, at, following, reads, passed, me)
                mine |= holders.has_second_copy(epoch, me)
                self._is_ownership_exact = True
        before = self._context.standing.owned.get(self.snapshot)
        gained = mine if before is None else mine & ~before
        self._handoffs.set_kept(mine)
        if self.space is not None and gained.any():
            self._context.adopt_blocks(self.space, np.flatnonzero(gained).astype(np.int32))
        self._taken_over = {}
        if group is not None:
            self._take_over_blocks(group)


def _load_reads(count: int, orders: Orders, ids: tuple[str, ...]) -> FirstReads:
    numbers: Mapping[str, int] = {node: number for number, node in enumerate(ids)}
    return FirstReads.of(count, [(numbers[node], order) for node, order in orders if node in numbers])


def _progress_by_node(ids: Sequence[str], positions: Sequence[EpochPosition], epoch: int) -> npt.NDArray[np.float64]:
    """Return the progress of each node in an epoch, by its slowest consumer: 0 to 1, or 2 if beyond it. Shape
    (nodes,)."""
    passed = np.zeros(len(ids))
    by_node: dict[str, tuple[int, float]] = {}
    for position in positions:
        by_node[position.node] = min(by_node.get(position.node, (position.epoch, position.done)), position[1:3])
    for number, node in enumerate(ids):
        at_epoch, done = by_node.get(node, (epoch, 0.0))
        passed[number] = done if at_epoch == epoch else 2.0 * (at_epoch > epoch)
    return passed
