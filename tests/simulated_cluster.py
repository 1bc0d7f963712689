"""Training nodes of one cluster on a clock of their own: on each of them the plan, the fetch plan, the eviction and the
shared snapshot of the daemon; between them transfers that take a while, and progress that is published once a second.

No bytes. Each rank of a job is that of a DistributedSampler; the ranks of a job read at one pace.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from cachefs.errors import NotFound
from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY, Presence
from cachefs.planning.blocks.space import BlockSpace, Samples
from cachefs.planning.cluster.copies import missing_second_copies, second_copy_room
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.cluster.rendezvous import RingMember as Placed
from cachefs.planning.cluster.schedule import Announcement
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
from cachefs_cluster.sharing.sections import ConsumerFacts, OrderRef
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.runtime.threads import Threads
from tests.simulated import space_of

SIZE = 110_000
LATENCY = 0.05  # seconds of a transfer between nodes; from the origin it takes twice as long
HEARD = 0.15  # seconds until a word is heard by others
NEWS = 1.0  # seconds between two words of where the others are
BATCH = 64  # second copies that a node fetches at once
SNAPSHOT = "space"


@dataclass(frozen=True)
class SimulatedJob:
    """One more job, or one more loader of a job. A job that is restarted is a second one of the same name and seed."""

    name: str
    # The nodes of its ranks, by rank: several may be on one node.
    nodes: tuple[int, ...]
    seed: int
    rate: float = 50.0  # reads per second and rank
    # Seconds from the begin of the first job to that of this one, and its epochs; `resumes`: the first that it reads,
    # from that part of the epoch on.
    start: float = 0.0
    epochs: int = 3
    resumes: int = 0
    resumes_at: float = 0.0
    # Seconds after which it is killed; 0: never.
    end: float = 0.0
    # From so many seconds after its start on it reads at its rate times a factor; by time.
    paces: tuple[tuple[float, float], ...] = ()
    # Reads by which each rank is ahead of its place, or behind it; empty: none is.
    drifts: tuple[int, ...] = ()
    # Name of the loader after the rank, and the part of the files, from the first one on, that it reads.
    loader: str = ""
    share: float = 1.0

    @property
    def loader_name(self) -> str:
        return f"{self.name}{self.loader}"

    def pace_at(self, seconds: float) -> float:
        """Return the reads per second of a rank, so many seconds after the start."""
        return self.rate * next((factor for since, factor in reversed(self.paces) if since <= seconds), 1.0)

    def reads_after(self, seconds: float) -> int:
        """Return the reads that a rank has done so many seconds after the start."""
        times = [0.0, *(since for since, _ in self.paces if since < seconds), max(0.0, seconds)]
        return int(sum(self.pace_at(begin) * (end - begin) for begin, end in pairwise(times)))


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
    # Most copies of each block.
    replicas: int = 1
    # Seconds after which the last node is lost, and those after which it is back with what it had; 0: never. The others
    # notice at once.
    loss: float = 0.0
    back: float = 0.0
    # Size of the cache of each node, relative to the others; empty: all are of one size.
    caches: tuple[float, ...] = ()
    # Jobs beside the first one, which the fields above describe.
    jobs: tuple[SimulatedJob, ...] = ()


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
class SimulatedRank:
    """One rank of a job, on one node."""

    job: SimulatedJob
    rank: int
    node: "SimulatedPeer"
    cluster: "SimulatedCluster"
    epoch: int = 0
    position: int = 0
    published_position: tuple[int, int] | None = None
    is_gone: bool = False
    # When it has published the orders of which epochs, the latest last.
    published: list[tuple[float, range]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.epoch = self.job.resumes
        self.position = self._begin = int(self.job.resumes_at * self.reads)

    @property
    def key(self) -> str:
        return f"{self.job.name}/{self.rank}{self.job.loader}"

    @property
    def drift(self) -> int:
        """Reads by which it is ahead of its place."""
        return self.job.drifts[self.rank] if self.job.drifts else 0

    @property
    def is_done(self) -> bool:
        return self.epoch == self.job.epochs or self.is_gone

    @property
    def reads(self) -> int:
        """Reads of an epoch."""
        return len(self.cluster.order(self.job, self.epoch, self.rank))

    @property
    def rate(self) -> float:
        """Reads per second, as the node has measured them: the latest pace at which it read."""
        passed = self.cluster.seconds_of(self.job)
        paces = [self.job.rate, *(self.job.rate * factor for since, factor in self.job.paces if since <= passed)]
        return next(pace for pace in reversed(paces) if pace)

    def publish(self) -> None:
        """Publish the sequence, as far as it is known now."""
        ahead, epochs, plan = self.cluster.setting.ahead, self.job.epochs, self.node.plan
        if ahead is not None:
            self.published.append((self.cluster.now, range(self.epoch, min(epochs, self.epoch + ahead + 1))))
        for epoch in (self.epoch, self.epoch + 1):
            if epoch < epochs and plan.epoch(self.key, epoch) is None:
                order = self.cluster.order(self.job, epoch, self.rank)
                plan.set_epoch(self.key, SNAPSHOT, epoch, order, is_last=epoch == epochs - 1)

    def read_on(self, target: int) -> None:
        """target: reads of all epochs that are done then."""
        while not self.is_done:
            order = self.cluster.order(self.job, self.epoch, self.rank)
            done = (self.epoch - self.job.resumes) * len(order) + self.position - self._begin
            end = self.position + max(0, target - done)
            figures = self.cluster.figures_of(self.job, self.epoch)
            for block in order[self.position : end].tolist():
                self.node.read(block, figures)
            self.position = min(end, len(order))
            self.node.plan.set_progress(self.key, self.epoch, self.position, self.rate)
            if self.position < len(order):
                return
            self.epoch, self.position = self.epoch + 1, 0
            self.publish()


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
    ranks: list[SimulatedRank] = field(default_factory=list)
    # What it knows of all consumers.
    facts: dict[str, list[ConsumerFacts]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        space = self.cluster.space
        self.plan.add_space(space)
        self.presence.add_space(space)
        self.state = self.presence.states[SNAPSHOT]
        self.policy = Clairvoyant(self.plan, None, self.standing)
        self.tier = SimulatedTier(self.policy, self.cluster.capacity_of(self.number))
        limits = FetchLimits(2.0, 1 << 30, 512 << 20, 48)
        self.fetches = FetchPlan(self.plan, self.presence, limits, self.cluster.now, self.standing)
        self.latency = FetchLatency(LATENCY)
        self.shared = self.cluster.share(self)
        self.second_copies = 0  # second copies fetched

    @property
    def is_done(self) -> bool:
        return all(rank.is_done for rank in self.ranks)

    def read(self, block: int, figures: Figures) -> None:
        figures.reads += 1
        if self.state[block] == ABSENT:
            figures.late += 1
            self.cluster.find(self, block, figures)
            self.take(block)

    # --- fetching ---------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        fetches, now = self.fetches, self.cluster.now
        fetches.refresh(now, 0)
        free = self.tier.free - (sum(self.tier.sizes.values()) + self.tier.free >> 6)
        self._start(fetches.choose_for_free_room(max(0, free)))
        own = dict.fromkeys((rank.key for rank in self.ranks), 0.2)
        margins = {**own, **dict.fromkeys(self.shared.remote_read_keys, 0.5)}
        batch = fetches.choose_for_window(fetches.update_window(margins, self.latency, now))
        for part in fetches.split_copies(batch) if batch is not None else ():
            room = self.tier.free + self.policy.replaceable_bytes(part.last_key)
            self._start(fetches.fit_into_room(part.blocks, room))
        fetches.note_idle()

    def make_second_copies(self) -> None:
        """Fetch second copies from the other nodes, as far as there is room."""
        second, owned = self.standing.second_copies.get(SNAPSHOT), self.standing.owned.get(SNAPSHOT)
        if not self.shared.is_hot or not self.ranks or second is None or owned is None:
            return
        present, sizes = self.state != ABSENT, np.full(len(owned), SIZE, np.uint32)
        soon = self.plan.next_use_of(SNAPSHOT, np.arange(len(owned))) <= self.standing.copy_window
        room = self.tier.free + second_copy_room(owned, second, present, soon, sizes)
        for block in missing_second_copies(second & ~owned, present, sizes, room)[:BATCH].tolist():
            others = [one for one in self.cluster.nodes if one is not self and one.name not in self.cluster.lost]
            if block not in self.flights and any(one.state[block] != ABSENT for one in others):
                self.second_copies += self.take(block)

    def _start(self, blocks: Sequence[UpcomingBlock]) -> None:
        self.fetches.note_started(blocks)
        for one in blocks:
            waiting = self.flights.setdefault(one.number, [])
            waiting.append(one)
            if len(waiting) == 1:
                origin = self.cluster.find(self, one.number, self.cluster.figures_for(self, one.consumer))
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


def _map_of(job: SimulatedJob) -> str:
    """Return the digest of the sample map of a loader; empty where it reads all files."""
    return hashlib.blake2b(job.loader_name.encode(), digest_size=16).hexdigest() if job.share < 1 else ""


class SimulatedCluster:
    """Its nodes are called a, b, c, ..."""

    def __init__(self, setting: Setting, threads: Threads) -> None:
        self.setting = setting
        self.threads = threads
        self.now = 1000.0
        self.space: BlockSpace = space_of([SIZE] * setting.files, SNAPSHOT)
        self.samples = self._samples_of(setting.files)
        self.keys = self.space.keys(np.arange(setting.files))
        self.job = SimulatedJob("job", tuple(range(setting.nodes)), 0, setting.rate, 0.0, setting.epochs)
        if setting.drift:
            self.job = replace(self.job, drifts=(setting.drift, *[0] * (setting.nodes - 1)))
        self.jobs = (self.job, *setting.jobs)
        self._figures: dict[tuple[str, int], Figures] = {}
        self.remembered: dict[str, HolderState] = {}
        self.announced: dict[str, Announcement] = {}  # by node: the one that it follows
        self.rooms: dict[str, PlanMemory] = {}
        self.names = [chr(ord("a") + number) for number in range(setting.nodes)]
        self.lost: set[str] = set()
        self.unknown_maps: set[str] = set()  # digests of sample maps that no node can fetch
        self._maps = {_map_of(job): self._samples_of(self._files_of(job)) for job in self.jobs}  # by digest
        self.ring_epoch = 1
        self.disagreements: set[tuple[str, int]] = set()  # leader and epoch for which nodes had different holders
        self._digests: dict[tuple[str, int, int], bytes] = {}  # by leader, epoch and epoch of the ring
        self._later: list[tuple[float, partial[None]]] = []
        self._orders: dict[tuple[str, int, int], np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
        self.nodes: list[SimulatedPeer] = []
        self.nodes = [SimulatedPeer(self, name, number) for number, name in enumerate(self.names)]
        self.ranks: list[SimulatedRank] = []
        self._began = self.now
        self._start_jobs()
        self._regroup()

    @property
    def figures(self) -> list[Figures]:
        """Of the first job, by epoch."""
        return self.figures_by_epoch("job")

    def figures_by_epoch(self, job: str) -> list[Figures]:
        return [one for (name, _), one in sorted(self._figures.items()) if name == job]

    @property
    def origin_reads(self) -> int:
        return sum(one.from_origin for one in self._figures.values())

    def figures_of(self, job: SimulatedJob, epoch: int) -> Figures:
        return self._figures.setdefault((job.loader_name, min(epoch, job.epochs - 1)), Figures())

    def figures_for(self, node: SimulatedPeer, consumer: str) -> Figures:
        """Of the epoch for which *consumer* of a node has blocks fetched: that in which it is, or its job."""
        own = next((rank for rank in node.ranks if rank.key == consumer and not rank.is_gone), None)
        if own is None:
            job = next(one for one in self.jobs if consumer.startswith(f"{one.name}/"))
            own = next((rank for rank in self.ranks if rank.job is job and not rank.is_gone), self.ranks[0])
        return self.figures_of(own.job, own.epoch)

    def seconds_of(self, job: SimulatedJob) -> float:
        """Return the seconds since a job has begun to read."""
        return self.now - self._began - self.setting.start - job.start

    def capacity_of(self, number: int) -> int:
        """Return the bytes of the cache of a node."""
        setting = self.setting
        sizes = setting.caches or (1.0,) * setting.nodes
        return int(setting.files * setting.capacity * sizes[number] / sum(sizes)) * SIZE

    def _samples_of(self, files: int) -> Samples:
        return Samples(self.space, np.arange(files + 1), np.arange(files, dtype=np.int32))

    def _files_of(self, job: SimulatedJob) -> int:
        return int(self.setting.files * job.share)

    def _start_jobs(self) -> None:
        """Start the jobs whose time has come, and end those that are killed."""
        passed = self.now - self._began
        started = {id(rank.job) for rank in self.ranks}
        for job in self.jobs:
            if id(job) not in started and job.start <= passed:
                for rank, number in enumerate(job.nodes):
                    one = SimulatedRank(job, rank, self.nodes[number], self)
                    self.ranks.append(one)
                    one.node.ranks.append(one)
                    one.publish()
                    if one.node.name in self.lost:
                        self._remove([one])
            if job.end and passed >= job.end:
                self._remove([rank for rank in self.ranks if rank.job is job and not rank.is_gone])

    def _remove(self, ranks: "Sequence[SimulatedRank]") -> None:
        for rank in ranks:
            rank.is_gone = True
            rank.node.plan.remove_consumer(rank.key)

    def _regroup(self) -> None:
        """What each node knows of the others by now."""
        rest = [node for node in self.nodes if node.name not in self.lost]
        for node in rest:
            facts: dict[str, list[ConsumerFacts]] = {}
            for rank in self.ranks:
                if rank.node in rest and not rank.is_done:
                    facts.setdefault(rank.node.name, []).append(self._facts(rank, node))
            if facts != node.facts:
                node.facts = facts
                node.shared.set_groups(groups_of(facts))

    def ring(self, names: Sequence[str]) -> PlacementRing:
        numbers = [self.names.index(name) for name in names]
        members = tuple(
            Placed(
                self.names[number],
                (1 + ord(self.names[number])) * 0x9E3779B97F4A7C15 % (1 << 64),
                self.setting.caches[number] if self.setting.caches else 1.0,
            )
            for number in numbers
        )
        return PlacementRing(self.ring_epoch, members, tuple(self.capacity_of(number) for number in numbers))

    def spec(self, job: SimulatedJob, rank: int) -> SamplerSpec:
        return SamplerSpec(
            kind="torch-distributed", size=self._files_of(job), epochs=job.epochs, seed=job.seed,
            replicas=len(job.nodes), rank=rank,
        )  # fmt: skip

    def order(self, job: SimulatedJob, epoch: int, rank: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        drawn = 0 if self.setting.repeats else epoch
        key = job.loader_name, drawn, rank
        if key not in self._orders:
            self._orders[key] = epoch_order(self.spec(job, rank), drawn).astype(np.int32)
        return self._orders[key]

    def _facts(self, rank: SimulatedRank, viewer: SimulatedPeer) -> ConsumerFacts:
        """Of a consumer, as *viewer* knows it."""
        setting, job, number, ranks = self.setting, rank.job, rank.rank, len(rank.job.nodes)
        name, consumer, files = job.name, f"{number}{job.loader}", self._files_of(job)
        samples_map = _map_of(job)
        if setting.ahead is None:
            return ConsumerFacts(name, consumer, "ds", SNAPSHOT, number, ranks, self.spec(job, number), map=samples_map)
        first, last = setting.told
        late = 0.0 if viewer is rank.node else first + (last - first) * viewer.number / setting.nodes
        known = [epochs for when, epochs in rank.published if when + late <= self.now]
        samples = files // ranks
        digest = f"{job.seed:08x}{number:08x}"  # different orders have different ones
        orders = [OrderRef(one, f"{digest}{one:016x}", samples) for one in (known[-1] if known else ())]
        return ConsumerFacts(name, consumer, "ds", SNAPSHOT, number, ranks, None, orders, samples_map)

    def share(self, node: SimulatedPeer) -> SharedSnapshot:
        async def samples(group: ConsumerGroup, digest: str) -> Samples:
            if digest in self.unknown_maps:
                raise NotFound("the sample map is not known")
            return self._maps.get(digest, self.samples)

        async def remembered(space: BlockSpace) -> HolderState | None:
            own = self.remembered.get(node.name)
            others = [one.shared.holder_state() for one in self.nodes if one is not node and one.name not in self.lost]
            known = [one for one in others if one is not None and (own is None or one.count >= own.count)]
            return max(known, key=lambda one: one.count, default=own)

        def remember(snapshot: str, known: HolderState) -> None:
            self.remembered[node.name] = known
            digest = known.holders.tobytes()
            if self._digests.setdefault((known.job, known.epoch, self.ring_epoch), digest) != digest:
                self.disagreements.add((known.job, known.epoch))

        def announce(snapshot: str, announcement: Announcement) -> None:
            self.announced[node.name] = announcement
            for other in self.nodes:
                if other is not node and node.name not in self.lost and other.name not in self.lost:
                    self.later(HEARD, partial(other.shared.offer_announcement, announcement))

        def positions(group: ConsumerGroup) -> list[EpochPosition]:
            found = []
            for rank in self.ranks:
                if rank.node.name in self.lost or rank.job.loader_name != group.name:
                    continue
                place = (rank.epoch, rank.position) if rank.node is node else rank.published_position
                if place is not None and place[0] < rank.job.epochs and not rank.is_gone:
                    found.append(EpochPosition(rank.node.name, place[0], place[1] / rank.reads, rank.rate / rank.reads))
            return found

        async def published(member: GroupMember, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
            rank = str(member.facts.rank)
            job = next(
                one for one in self.jobs if one.name == member.facts.job and rank + one.loader == member.facts.consumer
            )
            return self.order(job, epoch, member.facts.rank).astype(np.uint32)

        surroundings = SnapshotContext(
            node.name,
            node.plan,
            node.standing,
            self.threads,
            self.rooms.setdefault(node.name, PlanMemory(1 << 30)),
            GroupOrders(self.threads, published),
            self.setting.replicas,
            samples,
            positions,
            lambda group: [rank.key for rank in node.ranks if rank.job.loader_name == group.name and not rank.is_done],
            remembered,
            remember,
            lambda space, blocks: None,  # it has no transient blocks
            states_of=lambda snapshot: node.state,
            publish_announcement=announce,
            are_others_complete=lambda: not self.lost,  # blocks are on the way to other nodes only after a loss
        )
        return SharedSnapshot(SNAPSHOT, self.ring([name for name in self.names if name not in self.lost]), surroundings)

    def later(self, seconds: float, what: "partial[None]") -> None:
        self._later.append((self.now + seconds, what))

    def find(self, node: SimulatedPeer, block: int, figures: Figures) -> bool:
        """Where the node gets the block from, as its route says. True: from the origin."""
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
        self.ring_epoch += 1
        self._remove([rank for rank in lost.ranks if not rank.is_gone])
        rest = [node for node in self.nodes if node.name not in self.lost]
        for node in rest:
            node.shared.set_ring(self.ring([one.name for one in rest]))
        self._regroup()

    async def bring_back(self, lost: SimulatedPeer) -> None:
        """It starts again with the blocks that it had; its ranks are gone."""
        await lost.shared.close()
        lost.flights.clear()
        self.lost.discard(lost.name)
        self.ring_epoch += 1
        lost.facts, lost.shared = {}, self.share(lost)
        rest = [node for node in self.nodes if node.name not in self.lost]
        for node in rest:
            node.shared.set_ring(self.ring([one.name for one in rest]))
            if node is not lost and node.name in self.announced:
                lost.shared.offer_announcement(self.announced[node.name])
        self._regroup()

    async def run(self) -> "SimulatedCluster":
        setting, published = self.setting, -NEWS
        await self._settle()
        while not self._is_over():
            self.now += setting.tick
            self._start_jobs()
            due = [what for when, what in self._later if when <= self.now]
            self._later = [one for one in self._later if one[0] > self.now]
            for what in due:
                what()
            passed = self.now - self._began - setting.start
            is_away = setting.loss and passed >= setting.loss and not (setting.back and passed >= setting.back)
            if is_away and not self.lost:
                self.lose(self.nodes[-1])
            elif self.lost and not is_away:
                await self.bring_back(self.nodes[-1])
            nodes = [node for node in self.nodes if node.name not in self.lost]
            for rank in self.ranks:
                target = rank.job.reads_after(self.seconds_of(rank.job))
                if rank.node in nodes:
                    rank.read_on(max(0, target + (rank.drift if target > 0 else 0)))
            if self.now - published >= NEWS:
                published = self.now
                for rank in self.ranks:
                    if rank.node in nodes:
                        rank.published_position = (rank.epoch, rank.position)
            self._regroup()
            for node in nodes:
                node.shared.follow_readers()
            await self._settle()
            for node in nodes:
                node.fetch()
                node.make_second_copies()
        for node in self.nodes:
            await node.shared.close()
        return self

    def _is_over(self) -> bool:
        return len({id(rank.job) for rank in self.ranks}) == len(self.jobs) and all(rank.is_done for rank in self.ranks)

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
