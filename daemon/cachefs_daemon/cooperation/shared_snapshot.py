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
from cachefs.planning.cluster.homes import NO_NODE
from cachefs.planning.cluster.reads import Reads
from cachefs.planning.cluster.scale import Demand
from cachefs.planning.cluster.standing import Mine, mine_now
from cachefs_daemon.cooperation.group_samples import GroupSamples
from cachefs_daemon.cooperation.groups import Group
from cachefs_daemon.cooperation.holders import FORMER_SECONDS, Holders, Known, ReadsOf, Ring
from cachefs_daemon.cooperation.leading import leading
from cachefs_daemon.cooperation.orders import Orders, is_shared_out, knows, published_in
from cachefs_daemon.cooperation.owed import Owed
from cachefs_daemon.cooperation.peer_reads import PeerReads
from cachefs_daemon.cooperation.reads_here import ReadsHere
from cachefs_daemon.cooperation.surroundings import Place, Surroundings
from cachefs_daemon.cooperation.timeliness import own_verdict, verdict_of
from cachefs_daemon.jobs.plan_room import PER_READ, Part

log = logging.getLogger(__name__)

# Bytes per block for homes, holders and reads of some epochs, and for the plan of remote reads.
PER_BLOCK: Final = 64
# Seconds until a retry after a failure.
RETRY_SECONDS: Final = 2.0
# Seconds within which readers publish their progress to a node that has just joined.
PLACES_SECONDS: Final = 5.0
# Seconds, besides those for which a read counts as near, by which a node counts a block as its own before reading it.
LEAD: Final = 0.25


# Epochs by which the readers of a job may be apart. Usually they go in step, and the holders follow from the position
# of the slowest. After one was cut off for a while and went on by itself, all looked in the wrong places, and a fifth
# of all blocks came from the origin (4 nodes, 5 epochs apart; with copies at home 4 %). Beyond APART, copies stay at
# home until the spread is at most TOGETHER again.
APART: Final = 2.0
TOGETHER: Final = 1.0
# Fraction of an epoch after which it counts as begun.
BEGUN: Final = 0.01


_START: Final = Place("", 0, 0.0, 0.0)


class SharedSnapshot:
    """Keeps holders and plans of one snapshot up to date in a task of its own. Used on the event loop."""

    def __init__(self, snapshot: str, ring: Ring, around: Surroundings) -> None:
        self.snapshot = snapshot
        self.problem = ""
        self.holders: Holders | None = None
        self._around = around
        self._ring = ring
        self._groups: list[Group] = []
        self._samples = GroupSamples(around)
        self._readers = ReadsHere(snapshot, around, lambda group: self._slowest(group).epoch)
        self._room_key = ""  # account of the memory taken for the plan
        self._led: dict[str, tuple[int, int]] = {}  # by own consumer: epoch and read up to which `_take_over` has gone
        self._at: dict[object, Place] = {}  # by key of the group: its slowest consumer, as of the last step
        self._coordinated: Group | None = None
        self._was_apart = False  # whether copies stayed at home because the readers were apart
        self._apart: object = None  # key of the group whose readers are too far apart to coordinate copies
        self._stands = False  # whether standing is exact for all blocks, including those read in this epoch
        self._adopted: Known | None = None
        self._missed = False  # whether a published order could not be fetched at the last attempt
        self._owed = Owed(snapshot, around.me, around.standing, around.filled)
        self._news = asyncio.Event()
        self._news.set()
        self._is_busy = True
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._readers.close()
        self._around.standing.forget(self.snapshot)
        self._give_room_back()

    @property
    def space(self) -> BlockSpace | None:
        """The blocks of the snapshot; None until the first samples are known."""
        return self._samples.space

    # --- events -------------------------------------------------------------------------------------------------------

    def regroup(self, groups: list[Group]) -> None:
        """Set the groups that read the snapshot."""
        if groups != self._groups:
            self._groups = groups
            self._news.set()

    def follow(self, ring: Ring) -> None:
        """Set the members that count for placement."""
        if ring != self._ring:
            self._ring = ring
            self._news.set()

    def adopt(self, known: Known) -> None:
        """Take over holders from another node, which knows better."""
        self._adopted = known
        self._news.set()

    def handed_over(self, node: str, keys: Sequence[bytes]) -> None:
        """Record that a node got blocks from this one."""
        holders, space = self.holders, self.space
        if holders is None or space is None or node not in holders.ring.ids:
            return
        ids, number = space.ids(keys), holders.ring.ids.index(node)
        ids = np.unique(ids[ids >= 0])
        self._owed.given(ids, partial(self._keeps, number))
        reader = self._readers.of(self._coordinated) if self._coordinated is not None else None
        if reader is not None:
            for epoch, blocks in reader.handed_over(ids, number):
                self._let_go(epoch, blocks)

    def step(self) -> None:
        """Follow the progress of the readers. Call several times a second."""
        for group in self._groups:
            reader = self._readers.of(group)
            slowest = self._at[group.key] = self._slowest(group)
            if reader is None:
                continue
            for epoch, blocks in reader.follow(slowest.epoch, slowest.done, slowest.rate):
                if self._coordinated is not None and group.key == self._coordinated.key:
                    self._let_go(epoch, blocks)
            following = slowest.epoch + 1
            if self._is_decided(group, following) and not self._is_planned(group, reader, following):
                self._news.set()
        self._look_whether_apart()
        if self._coordinated is not None:
            self._take_over(self._coordinated)
        if self.is_up_to_date:
            self._owed.look()

    def _look_whether_apart(self) -> None:
        """Check the spread of the readers: of the group that coordinates copies, would do so if it were together, or is
        the only one."""
        alone = self._groups[0] if len(self._groups) == 1 else None
        group = self._coordinated or next((one for one in self._groups if one.key == self._apart), alone)
        places = [place.epoch + place.done for place in self._around.places(group)] if group is not None else []
        spread = max(places) - min(places) if places else 0.0
        was_apart = self._apart is not None
        is_apart = spread > (TOGETHER if was_apart else APART)
        self._apart = group.key if is_apart and group is not None else None
        if is_apart != was_apart and group is not None:
            self._news.set()
            what = "blocks stay at home until they are together again" if is_apart else "they are together again"
            log.info("snapshot %s: readers of job %s are %.1f epochs apart; %s", self.snapshot, group.job, spread, what)

    def _is_planned(self, group: Group, reader: PeerReads, epoch: int) -> bool:
        """Return whether the plan of that epoch is as complete as it can be."""
        is_open = group.spec is None and self._coordinated is not None and group.key == self._coordinated.key
        if is_open and self.holders is not None and epoch not in self.holders.at:
            return False
        return reader.knows(epoch) or not knows(group, epoch)

    def _is_decided(self, group: Group, epoch: int) -> bool:
        """Return whether the holders at the start of that epoch are decided, or can be by now."""
        if self._coordinated is None or group.key != self._coordinated.key or group.spec is not None:
            return True
        if self.holders is not None and epoch in self.holders.at:
            return True
        verdict = self._verdict(group, epoch - 1)
        return verdict is not None and (not verdict or (knows(group, epoch - 1) and knows(group, epoch)))

    def _verdict(self, group: Group, epoch: int) -> bool | None:
        """Return whether copies change hands in an epoch of a group that publishes orders one by one; None if open."""
        around, ring = self._around, self._ring.ids
        first = min((node for node in group.nodes if node in ring), default=around.me)
        if first != around.me:
            return verdict_of(epoch, around.settled(first, group), self._slowest(group)[1:3])
        own = [place[1:3] for place in around.places(group) if place.node == around.me]
        return own_verdict(epoch, max(self._slowest(group)[1:3], min(own, default=(0, 0.0))))

    @property
    def is_up_to_date(self) -> bool:
        """Whether all decisions that follow from known facts are made."""
        return not self._is_busy and not self._news.is_set()

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def reader_keys(self) -> list[str]:
        """Names of remote reads in the plan."""
        return self._readers.names

    @property
    def leader(self) -> str:
        """Name of the group that coordinates copies; empty if there is none."""
        return self._coordinated.name if self._coordinated is not None else ""

    def where(self, block: int) -> tuple[int, tuple[int, ...], int]:
        """Return the holder of a block, other possible holders, and its home: places in the ring, or NO_NODE."""
        holders = self.holders
        assert holders is not None
        home = int(holders.homes[block])
        if self._coordinated is None or not holders.at:
            return home, (), home
        epoch, done = self._place.epoch, self._place.done
        before, after, reads = holders.at.get(epoch), holders.at.get(epoch + 1), holders.reads.get(epoch)
        if before is None:
            return home, (), home
        now, others = int(before[block]), tuple[int, ...]()
        if after is not None and after[block] != now:
            others = (int(after[block]),)
            if reads is not None and reads.when is not None and reads.when[block] < done:
                now, others = others[0], (now,)
        return now, others, home

    def former(self, block: int) -> list[str]:
        """Return the ids of nodes that may have held a block before the ring changed; empty after a while."""
        former = self.holders.former if self.holders is not None else None
        if former is None or asyncio.get_running_loop().time() - former.until > FORMER_SECONDS:
            return []
        numbers = dict.fromkeys(int(nodes[block]) for nodes in (*former.besides, former.holders))
        return [former.ids[number] for number in numbers if number < len(former.ids)]

    def seconds(self, block: int) -> list[int]:
        """Return the current or next keepers of the second copy of a block, as places in the ring."""
        assert self.holders is not None
        found = self.holders.seconds(self._place.epoch, np.array([block], np.int32))
        return [number for nodes in found if (number := int(nodes[0])) != NO_NODE]

    def demand(self) -> Demand:
        """Return the demand of all groups together."""
        size = max((self._samples.size(group) for group in self._groups), default=0)
        places = [(group, self._slowest(group)) for group in self._groups]
        left = [group.spec.epochs - at.epoch - at.done if group.spec else math.inf for group, at in places]
        rate = max((at.rate for _, at in places), default=0.0)
        return Demand(size, max(0.0, *left, 0.0), 1 / rate if rate > 0 else 0.0)

    def known(self) -> Known | None:
        """Return the holders, for other nodes; None if no job coordinates copies."""
        return (
            self.holders.known(self._place.epoch)
            if self.holders is not None and self._coordinated is not None
            else None
        )

    @property
    def _place(self) -> Place:
        return self._at.get(self._coordinated.key, _START) if self._coordinated is not None else _START

    def _slowest(self, group: Group) -> Place:
        group = next((one for one in self._groups if one.key == group.key), group)  # some members may have ended
        places = self._around.places(group)
        said = [min(one.epoch for one in member.facts.orders) for member in group.members if member.facts.orders]
        begun = min(said, default=0) if group.spec is None else 0
        if not places:
            return Place("", begun, 0.0, 0.0)
        slowest = min(places, key=lambda place: (place.epoch, place.done))
        if slowest.epoch < begun:  # its last progress is older than its orders
            slowest = Place(slowest.node, begun, 0.0, 0.0)
        return slowest._replace(rate=max(place.rate for place in places))

    # --- copies change hands ------------------------------------------------------------------------------------------

    def _let_go(self, epoch: int, blocks: Ids) -> None:
        """Update standing after blocks were read by other nodes, or given to them, in *epoch*: another node may keep
        them from then on."""
        holders = self.holders
        following = holders.at.get(epoch + 1) if holders is not None else None
        if holders is None or following is None or not len(blocks):
            return
        me = self._me
        mine = (following[blocks] == me) | holders.keeps_second(epoch + 1, me, blocks)
        self._around.standing.update(self.snapshot, blocks, mine & (me != NO_NODE))

    def _take_over(self, group: Group) -> None:
        """Count blocks that this node reads next, and then keeps, as its own from now on."""
        plan, standing, holders, me = self._around.plan, self._around.standing, self.holders, self._me
        if holders is None or me == NO_NODE:
            return
        for key in self._around.own(group):
            window = plan.window(key, 0, 1)
            if window is None:
                continue
            current, position = plan.place(key)
            left = position + int((standing.near + LEAD) / window.period) + 1
            led = max(self._led.get(key, (current, position)), (current, position))
            for epoch in (current, current + 1):
                published, following = plan.epoch(key, epoch), holders.at.get(epoch + 1)
                if published is None or following is None or left <= 0:
                    break
                begin = led[1] if led[0] == epoch else 0
                blocks = published.blocks[begin:left]
                if led[0] <= epoch and len(blocks):
                    self._gain(blocks[following[blocks] == me])
                    led = (epoch, begin + len(blocks))
                left -= len(published.blocks)
            self._led[key] = led

    def _gain(self, blocks: Ids) -> None:
        marks, space = self._around.standing.mine.get(self.snapshot), self.space
        if marks is None or space is None:
            return
        gained = blocks[~marks[blocks]]
        if len(gained):
            self._around.standing.update(self.snapshot, gained, True)
            self._around.adopt(space, gained)

    @property
    def _me(self) -> int:
        ids = self.holders.ring.ids if self.holders is not None else ()
        return ids.index(self._around.me) if self._around.me in ids else NO_NODE

    def _keeps(self, node: int, ids: Ids) -> Mine:
        """Return which of these blocks the node keeps, or will in the next epoch: shape (n,), bool."""
        holders, epoch = self.holders, self._place.epoch
        assert holders is not None
        kept: Mine = holders.kept(epoch, node, ids) | holders.kept(epoch + 1, node, ids)
        return kept

    # --- decisions, in a task -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._is_busy = False
            await self._news.wait()
            self._is_busy = True
            self._news.clear()
            pause = RETRY_SECONDS
            try:
                if await self._bring_up_to_date():
                    pause, self.problem = 0.0, ""
            except StoreFull as error:
                self._note(f"no plan of what other nodes read of it: {error}")
            except CachefsError as error:
                self._note(f"what other nodes read of it is not known yet: {error}")
            except Exception as error:
                log.exception("snapshot %s is not shared", self.snapshot)
                self.problem = f"internal error ({error!r})"
            if pause:
                await asyncio.sleep(pause)
                self._news.set()

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("snapshot %s: %s", self.snapshot, problem)

    async def _bring_up_to_date(self) -> bool:
        """Recompute all decisions. Returns False if a retry is needed. Raises CachefsError."""
        around, groups = self._around, list(self._groups)
        is_known, space = await self._samples.look(groups), self.space
        if not is_known or space is None:
            return False
        if self.holders is None:
            self.holders = Holders(space, around.replicas, around.threads)
        holders = self.holders
        self._take_room(space, groups)
        if around.plan.spaces.get(self.snapshot) is not space:
            around.plan.add_space(space)
        place = self._place
        former = holders.former
        changed = await holders.follow(self._ring, place.epoch, place.done)
        if holders.former is not None and holders.former is not former:
            self._owed.note(holders.former)
        changed |= await self._coordinate(holders, space, groups)
        coordinated, stands_anew, self._missed = self._coordinated, False, False
        if coordinated is not None:
            epoch = self._slowest(coordinated).epoch
            verdict = partial(self._verdict, coordinated) if coordinated.spec is None else None
            if (is_new := await holders.advance(epoch, self._reads_of(coordinated), verdict)) or changed:
                # Keepers of second copies change with each epoch; other blocks change hands read by read.
                stands_anew = is_new and around.replicas > 1
                changed |= not self._stands
                if (known := holders.known(epoch)) is not None:
                    around.remember(self.snapshot, known)
        if changed:
            self._readers.outdate()
        await self._readers.plan(groups, space, holders.ring.ids, self._kept_in)
        if changed or stands_anew or self.snapshot not in around.standing.mine:
            await self._stand_anew(holders)
        if holders.ring != self._ring or groups != self._groups:
            self._news.set()
        return not self._missed

    def _give_room_back(self) -> None:
        if self._room_key:
            self._around.room.give_back(self._room_key)
        self._room_key = ""

    def _take_room(self, space: BlockSpace, groups: Sequence[Group]) -> None:
        """Reserve memory on the account of the first job, or of another one after its end. Raises StoreFull."""
        key = f"{groups[0].job if groups else ''}/peers {self.snapshot}"
        if key != self._room_key:
            self._give_room_back()
            self._room_key = key
        size = PER_BLOCK * space.count + self._samples.memory + PER_READ * self._readers.count
        self._around.room.take(key, Part.PLAN, size)

    async def _coordinate(self, holders: Holders, space: BlockSpace, groups: list[Group]) -> bool:
        """Choose the group that decides where copies go, if any. Returns whether the holders have changed."""
        before = self._coordinated
        # When a rank ends before the others, or its node is away, the copies of the others stay where the sequences
        # have them; a node that comes back meanwhile joins in.
        elsewhere = {one.key for one in groups if self._around.coordinated(one)}
        last = before.key if before is not None else None
        group = await self._around.threads.planning(leading, groups, self._samples.extents, last, elsewhere)
        goes_on = group is not None and (group.key == last or group.key in elsewhere)
        is_apart = group is not None and group.key == self._apart
        if group is None or is_apart or not holders.ring.is_known or not (goes_on or self._is_steady(group)):
            self._was_apart = is_apart
            if before is not None:
                place = self._place
                holders.stay_home(place.epoch, place.done)
                self._around.forget(self.snapshot)
            self._coordinated, self._adopted = None, None
            return before is not None
        adopted, self._adopted = self._adopted, None
        if before is not None and before.name == group.name and adopted is None:
            self._coordinated = group
            place = self._slowest(group)
            if before.key != group.key:
                # The last sampler's order of the current epoch is not what is read.
                holders.decide_anew(place.epoch)
                return True
            if before.readers != group.readers:
                # Blocks already read have changed hands as decided.
                holders.decide_anew(place.epoch + (place.done > BEGUN))
                return True
            return False
        # After readers were apart no node knows better, since all copies have gone home meanwhile.
        known = adopted or (await self._around.remembered(space) if not self._was_apart else None)
        self._was_apart = False
        if adopted is None and known is not None and known.job == group.name and self._around.coordinated(group):
            await self._hear_places(group, known.epoch)
        places = [place.epoch for place in self._around.places(group)]
        slowest = self._slowest(group).epoch
        await holders.begin(group.name, slowest, max(places, default=slowest), known)
        self._coordinated = group
        log.info(
            "snapshot %s: copies go where job %s reads them next, from epoch %d on",
            self.snapshot, group.job, min(holders.at),
        )  # fmt: skip
        return True

    async def _hear_places(self, group: Group, epoch: int) -> None:
        """Wait until a consumer is known to be in that epoch or about to begin it, for at most PLACES_SECONDS: progress
        is sent only to nodes that have asked for it."""
        until = asyncio.get_running_loop().time() + PLACES_SECONDS
        while asyncio.get_running_loop().time() < until:
            if max((place.epoch for place in self._around.places(group)), default=-1) + 1 >= epoch:
                return
            await asyncio.sleep(0.05)

    def _is_steady(self, group: Group) -> bool:
        """Return whether the group publishes whole epochs. Orders that are published as they are drawn come in small
        parts, which do not tell when a block is read again."""
        if group.spec is not None:
            return True
        said = {one.epoch for member in group.members for one in member.facts.orders}
        samples = self._samples.count(group)
        return any(knows(group, epoch) and 2 * published_in(group, epoch) >= samples for epoch in said)

    def _reads_of(self, group: Group) -> ReadsOf:
        async def reads_of(epoch: int, ids: tuple[str, ...]) -> Reads | None:
            orders = await self._orders(group, epoch)
            if orders is None:
                return None
            shared_out = group.spec is not None or await self._around.threads.planning(is_shared_out, orders)
            count = self._samples.by_map[group.maps[0]].space.count
            return await self._around.threads.planning(_reads, count, orders if shared_out else [], ids)

        return reads_of

    async def _orders(self, group: Group, epoch: int) -> Orders | None:
        """Return the orders of an epoch; None if unknown. Raises CachefsError."""
        if not knows(group, epoch):
            return None
        try:
            return await self._around.orders.of(group, self._samples.by_map, epoch)
        except CachefsError as error:
            if group.spec is not None:
                raise
            self._missed = True
            self._note(f"what other nodes read of it in epoch {epoch} is not known yet: {error}")
            return None

    async def _kept_in(self, group: Group, epoch: int) -> tuple[Mine, Orders] | None:
        """Return which blocks this node keeps in an epoch until they are read, shape (blocks,), bool, and the orders of
        all members. None if unknown or undecided. Raises CachefsError."""
        holders, decided = self.holders, epoch
        assert holders is not None
        if self._coordinated is not None and holders.at:
            if group.key != self._coordinated.key:
                decided = min(holders.at)  # the reads of other groups have been where they are since then
            if decided not in holders.at:
                return None
        kept = await self._around.threads.planning(holders.kept, decided, self._me)
        orders = await self._orders(group, epoch)
        return (kept, orders) if orders is not None else None

    async def _stand_anew(self, holders: Holders) -> None:
        """Set for all blocks whether this node keeps them."""
        group, me = self._coordinated, self._me
        self._stands = False
        epoch = self._slowest(group).epoch if group is not None else 0
        mine = await self._around.threads.planning(holders.kept, epoch, me)
        if group is not None:
            at, following, reads = holders.at.get(epoch), holders.at.get(epoch + 1), holders.reads.get(epoch)
            if at is not None and following is not None and reads is not None and me != NO_NODE:
                passed = _passed(holders.ring.ids, self._around.places(group), epoch)
                mine = await self._around.threads.planning(mine_now, at, following, reads, passed, me)
                mine |= holders.keeps_second(epoch, me)
                self._stands = True
        before = self._around.standing.mine.get(self.snapshot)
        gained = mine if before is None else mine & ~before
        self._owed.stand(mine)
        if self.space is not None and gained.any():
            self._around.adopt(self.space, np.flatnonzero(gained).astype(np.int32))
        self._led = {}
        if group is not None:
            self._take_over(group)


def _reads(count: int, orders: Orders, ids: tuple[str, ...]) -> Reads:
    numbers: Mapping[str, int] = {node: number for number, node in enumerate(ids)}
    return Reads.of(count, [(numbers[node], order) for node, order in orders if node in numbers])


def _passed(ids: Sequence[str], places: Sequence[Place], epoch: int) -> npt.NDArray[np.float64]:
    """Return the progress of each node in an epoch, by its slowest consumer: 0 to 1, or 2 if beyond it. Shape
    (nodes,)."""
    passed = np.zeros(len(ids))
    by_node: dict[str, tuple[int, float]] = {}
    for place in places:
        by_node[place.node] = min(by_node.get(place.node, (place.epoch, place.done)), place[1:3])
    for number, node in enumerate(ids):
        at_epoch, done = by_node.get(node, (epoch, 0.0))
        passed[number] = done if at_epoch == epoch else 2.0 * (at_epoch > epoch)
    return passed
