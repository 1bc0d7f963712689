"""Training nodes of one cluster on a clock of their own: on each of them the plan, the fetch plan, the eviction and the
shared snapshot of the daemon; between them transfers that take a while, and word of where readers are once a second.

No bytes. All nodes read at one pace, each the rank of a DistributedSampler.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY, Presence
from cachefs.planning.blocks.space import BlockSpace, Samples
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.cluster.rendezvous import RingMember as Placed
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.simulated_tiers import SimulatedTier
from cachefs.planning.prefetch.fetch_plan import FetchLimits, FetchPlan
from cachefs.planning.prefetch.fetch_window import FetchLatency
from cachefs.planning.prefetch.lookahead import UpcomingBlock
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs_cluster.placement.group_orders import GroupOrders
from cachefs_cluster.placement.groups import ConsumerGroup, GroupMember, groups_of
from cachefs_cluster.placement.holders import HolderState, PlacementRing
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_cluster.placement.snapshot_context import EpochPosition, SnapshotContext
from cachefs_cluster.placement.timeliness import NOTHING_SETTLED, Settled
from cachefs_cluster.sharing.sections import ConsumerFacts, OrderRef
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.runtime.threads import Threads
from tests.simulated import space_of

SIZE = 110_000
LATENCY = 0.05  # seconds of a transfer between nodes; from the origin it takes twice as long
HEARD = 0.15  # seconds until a word is heard by others
NEWS = 1.0  # seconds between two words of where the others are
SNAPSHOT = "space"


@dataclass(frozen=True)
class Setting:
    nodes: int = 4
    files: int = 1200
    # Bytes of all caches together, as a part of the dataset.
    capacity: float = 1.1
    epochs: int = 3
    rate: float = 50.0  # reads per second and node
    tick: float = 0.1  # seconds
    # Reads by which the first node is ahead of all others.
    drift: int = 0
    # Seconds until the first epoch begins.
    start: float = 2.0
    # Each node publishes the orders of its epochs one by one, as it begins one, and those of so many that follow; None:
    # its sampler says all. Others know of that after so many seconds, the first node sooner than the last.
    ahead: int | None = None
    told: tuple[float, float] = (0.5, 1.0)
    # Its epochs are the first one again and again, as where a script does not set the epoch of its sampler.
    repeats: bool = False
    # Copies of each block.
    replicas: int = 1
    # Seconds after which the last node is lost for good; 0: never. The others notice at once.
    loss: float = 0.0


@dataclass
class Figures:
    """Of one epoch, all nodes together."""

    reads: int = 0
    from_peers: int = 0
    from_origin: int = 0
    late: int = 0
    # Of those from the origin, the ones since a node was lost.
    again: int = 0

    @property
    def local(self) -> float:
        return 1 - (self.from_peers + self.from_origin) / self.reads


@dataclass(eq=False)
class SimulatedPeer:
    """One node."""

    cluster: "SimulatedCluster"
    name: str
    number: int
    plan: Plan = field(default_factory=Plan)
    presence: Presence = field(default_factory=Presence)
    standing: Ownership = field(default_factory=Ownership)
    flights: dict[int, list[UpcomingBlock]] = field(default_factory=dict)
    epoch: int = 0
    position: int = 0
    said: tuple[int, int] | None = None
    # What it has said of the epochs in which copies change hands, and when.
    settled: list[tuple[float, Settled]] = field(default_factory=list)
    # What it knows of all consumers.
    facts: dict[str, list[ConsumerFacts]] = field(default_factory=dict)
    # When it has published the orders of which epochs, the latest last.
    published: list[tuple[float, range]] = field(default_factory=list)

    def __post_init__(self) -> None:
        space = self.cluster.space
        self.plan.add_space(space)
        self.presence.add_space(space)
        self.state = self.presence.states[SNAPSHOT]
        self.policy = Clairvoyant(self.plan, None, self.standing)
        setting = self.cluster.setting
        self.tier = SimulatedTier(self.policy, int(setting.files * setting.capacity / setting.nodes) * SIZE)
        limits = FetchLimits(2.0, 1 << 30, 512 << 20, 48)
        self.fetches = FetchPlan(self.plan, self.presence, limits, self.cluster.now, self.standing)
        self.latency = FetchLatency(LATENCY)
        self.shared = self.cluster.share(self)

    @property
    def key(self) -> str:
        return f"job/{self.name}"

    @property
    def is_done(self) -> bool:
        return self.epoch == self.cluster.setting.epochs

    def publish(self) -> None:
        setting, epochs = self.cluster.setting, self.cluster.setting.epochs
        if setting.ahead is not None:
            known = range(self.epoch, min(epochs, self.epoch + setting.ahead + 1))
            self.published.append((self.cluster.now, known))
        for epoch in (self.epoch, self.epoch + 1):
            if epoch < epochs and self.plan.epoch(self.key, epoch) is None:
                order = self.cluster.order(epoch, self.number)
                self.plan.set_epoch(self.key, SNAPSHOT, epoch, order, is_last=epoch == epochs - 1)

    # --- reading ----------------------------------------------------------------------------------------------------

    def read_on(self, target: int) -> None:
        """target: reads of all epochs that are done then."""
        while not self.is_done:
            order = self.cluster.order(self.epoch, self.number)
            done = self.epoch * len(order) + self.position
            end = self.position + max(0, target - done)
            for block in order[self.position : end].tolist():
                self._read(block)
            self.position = min(end, len(order))
            self.plan.set_progress(self.key, self.epoch, self.position, self.cluster.setting.rate)
            if self.position < len(order):
                return
            self.epoch, self.position = self.epoch + 1, 0
            self.publish()

    def _read(self, block: int) -> None:
        figures = self.cluster.figures[self.epoch]
        figures.reads += 1
        if self.state[block] == ABSENT:
            figures.late += 1
            self.cluster.find(self, block)
            self.take(block)

    # --- fetching ---------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        fetches, now = self.fetches, self.cluster.now
        fetches.refresh(now, 0)
        free = self.tier.free - (sum(self.tier.sizes.values()) + self.tier.free >> 6)
        self._start(fetches.choose_for_free_room(max(0, free)))
        margins = {self.key: 0.2, **dict.fromkeys(self.shared.remote_read_keys, 0.5)}
        batch = fetches.choose_for_window(fetches.update_window(margins, self.latency, now))
        for part in fetches.split_copies(batch) if batch is not None else ():
            room = self.tier.free + self.policy.replaceable_bytes(part.last_key)
            self._start(fetches.fit_into_room(part.blocks, room))
        fetches.note_idle()

    def _start(self, blocks: Sequence[UpcomingBlock]) -> None:
        self.fetches.note_started(blocks)
        for one in blocks:
            waiting = self.flights.setdefault(one.number, [])
            waiting.append(one)
            if len(waiting) == 1:
                origin = self.cluster.find(self, one.number)
                self.cluster.later(2 * LATENCY if origin else LATENCY, partial(self._landed, one.number))

    def _landed(self, block: int) -> None:
        taken = self.take(block)
        for one in self.flights.pop(block):
            if taken:
                self.fetches.note_landed(one)
            else:
                self.fetches.note_refused(one, self.cluster.now)

    def take(self, block: int) -> bool:
        """Into the tier, if its policy wants it. Is it there now?"""
        key = self.cluster.keys[block]
        if key not in self.tier and self.tier.can_admit(key, SIZE):
            for gone in self.tier.make_room(key, SIZE):
                self.presence.set_state(gone.key, ABSENT)
            if self.tier.add_block(key, SIZE):
                self.state[block] = IN_MEMORY
        return key in self.tier


class SimulatedCluster:
    """Its nodes are called a, b, c, ..."""

    def __init__(self, setting: Setting, threads: Threads) -> None:
        self.setting = setting
        self.threads = threads
        self.now = 1000.0
        self.space: BlockSpace = space_of([SIZE] * setting.files, SNAPSHOT)
        self.samples = Samples(self.space, np.arange(setting.files + 1), np.arange(setting.files, dtype=np.int32))
        self.keys = self.space.keys(np.arange(setting.files))
        self.figures = [Figures() for _ in range(setting.epochs)]
        self.remembered: dict[str, HolderState] = {}
        self.rooms: dict[str, PlanMemory] = {}
        self.names = [chr(ord("a") + number) for number in range(setting.nodes)]
        self.lost: set[str] = set()
        self._later: list[tuple[float, partial[None]]] = []
        self._orders: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
        self.nodes = [SimulatedPeer(self, name, number) for number, name in enumerate(self.names)]
        for node in self.nodes:
            node.publish()
        self._regroup()

    def _regroup(self) -> None:
        """What each node knows of the others by now."""
        rest = [node for node in self.nodes if node.name not in self.lost]
        for node in rest:
            facts = {one.name: [self._facts(one, node)] for one in rest}
            if facts != node.facts:
                node.facts = facts
                node.shared.set_groups(groups_of(facts))

    def ring(self, names: Sequence[str]) -> PlacementRing:
        capacity = int(self.setting.files * SIZE * self.setting.capacity / self.setting.nodes)
        members = tuple(Placed(name, (1 + ord(name)) * 0x9E3779B97F4A7C15 % (1 << 64), 1.0) for name in names)
        return PlacementRing(1 + len(names), members, (capacity,) * len(names))

    def spec(self, rank: int) -> SamplerSpec:
        setting = self.setting
        return SamplerSpec(
            kind="torch-distributed", size=setting.files, epochs=setting.epochs, replicas=setting.nodes, rank=rank
        )

    def order(self, epoch: int, number: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        if (epoch, number) not in self._orders:
            drawn = 0 if self.setting.repeats else epoch
            self._orders[epoch, number] = epoch_order(self.spec(number), drawn).astype(np.int32)
        return self._orders[epoch, number]

    def _facts(self, node: SimulatedPeer, viewer: SimulatedPeer) -> ConsumerFacts:
        """Of the consumer of *node*, as *viewer* knows it."""
        setting, rank = self.setting, node.number
        if setting.ahead is None:
            return ConsumerFacts("job", str(rank), "ds", SNAPSHOT, rank, setting.nodes, self.spec(rank))
        first, last = setting.told
        late = 0.0 if viewer is node else first + (last - first) * viewer.number / setting.nodes
        known = [epochs for when, epochs in node.published if when + late <= self.now]
        samples = setting.files // setting.nodes
        orders = [OrderRef(one, f"{rank:016x}{one:016x}", samples) for one in (known[-1] if known else ())]
        return ConsumerFacts("job", str(rank), "ds", SNAPSHOT, rank, setting.nodes, None, orders)

    def share(self, node: SimulatedPeer) -> SharedSnapshot:
        async def samples(group: ConsumerGroup, digest: str) -> Samples:
            return self.samples

        async def remembered(space: BlockSpace) -> HolderState | None:
            return self.remembered.get(node.name)

        def remember(snapshot: str, known: HolderState) -> None:
            self.remembered[node.name] = known
            node.settled.append((self.now, known.settled))

        def settled(name: str, group: ConsumerGroup) -> Settled:
            heard = [said for when, said in self.nodes[self.names.index(name)].settled if when + HEARD <= self.now]
            return heard[-1] if heard else NOTHING_SETTLED

        def places(group: ConsumerGroup) -> list[EpochPosition]:
            found = []
            for one in self.nodes:
                if one.name in self.lost:
                    continue
                place = (one.epoch, one.position) if one is node else one.said
                if place is not None and place[0] < self.setting.epochs:
                    reads = self.setting.files // self.setting.nodes
                    found.append(EpochPosition(one.name, place[0], place[1] / reads, self.setting.rate / reads))
            return found

        async def published(member: GroupMember, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
            return self.order(epoch, member.facts.rank).astype(np.uint32)

        surroundings = SnapshotContext(
            node.name,
            node.plan,
            node.standing,
            self.threads,
            self.rooms.setdefault(node.name, PlanMemory(1 << 30)),
            GroupOrders(self.threads, published),
            self.setting.replicas,
            samples,
            places,
            lambda group: [node.key],
            remembered,
            remember,
            lambda space, blocks: None,  # it has no transient blocks
            settled_epochs=settled,
        )
        return SharedSnapshot(SNAPSHOT, self.ring(self.names), surroundings)

    def later(self, seconds: float, what: "partial[None]") -> None:
        self._later.append((self.now + seconds, what))

    def find(self, node: SimulatedPeer, block: int) -> bool:
        """Where the node gets the block from, as its route says. True: from the origin."""
        figures = self.figures[min(node.epoch, self.setting.epochs - 1)]
        holder, others, home = node.shared.holders_of_block(block)
        assert node.shared.holders is not None
        ids = node.shared.holders.ring.ids
        numbers = (holder, *others, *node.shared.second_holders(block), home)
        for name in (*(ids[number] for number in numbers), *node.shared.former_holders(block)):
            other = self.nodes[self.names.index(name)]
            if other is not node and name not in self.lost and (other.state[block] != ABSENT or block in other.flights):
                if other.state[block] != ABSENT:
                    other.shared.note_handed_over(node.name, [self.keys[block]])
                figures.from_peers += 1
                return False
        figures.from_origin += 1
        figures.again += bool(self.lost)
        if (bringing := self.nodes[self.names.index(ids[holder])]) is not node:
            bringing.take(block)
            bringing.shared.note_handed_over(node.name, [self.keys[block]])
        return True

    def lose(self, lost: SimulatedPeer) -> None:
        """It is away, with all that it had."""
        self.lost.add(lost.name)
        rest = [node for node in self.nodes if node.name not in self.lost]
        for node in rest:
            node.shared.set_ring(self.ring([one.name for one in rest]))
        self._regroup()

    async def run(self) -> "SimulatedCluster":
        setting, began, said = self.setting, self.now, -NEWS
        await self._settle()
        while not all(node.is_done or node.name in self.lost for node in self.nodes):
            self.now += setting.tick
            due = [what for when, what in self._later if when <= self.now]
            self._later = [one for one in self._later if one[0] > self.now]
            for what in due:
                what()
            target = int((self.now - began - setting.start) * setting.rate)
            if setting.loss and not self.lost and self.now - began - setting.start >= setting.loss:
                self.lose(self.nodes[-1])
            nodes = [node for node in self.nodes if node.name not in self.lost]
            for node in nodes:
                node.read_on(target + (setting.drift if node.number == 0 and target > 0 else 0))
            if self.now - said >= NEWS:
                said = self.now
                for node in nodes:
                    node.said = (node.epoch, node.position)
            self._regroup()
            for node in nodes:
                node.shared.follow_readers()
            await self._settle()
            for node in nodes:
                if not node.is_done:
                    node.fetch()
        for node in self.nodes:
            await node.shared.close()
        return self

    async def _settle(self) -> None:
        while not all(node.shared.is_up_to_date or node.name in self.lost for node in self.nodes):  # noqa: ASYNC110 - no news are told
            await asyncio.sleep(0.001)


def simulated(setting: Setting) -> SimulatedCluster:
    """After all epochs."""

    async def run() -> SimulatedCluster:
        threads = Threads()
        try:
            return await SimulatedCluster(setting, threads).run()
        finally:
            threads.close()

    return asyncio.run(asyncio.wait_for(run(), 120))
