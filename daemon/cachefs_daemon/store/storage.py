"""Opens and recovers all parts of the store, and closes them in order."""

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cachefs.block import MEMORY, SSD
from cachefs.errors import ConfigError
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.eviction.policies import EvictionPolicy, make_policy
from cachefs.planning.eviction.policies.lru import UseOrder
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.eviction.quotas import Quotas
from cachefs.planning.eviction.tiering import Tiering, TierLocation, TierPolicies, has_free_room, transient_room
from cachefs.planning.pagecache.states import Coverage, MemoryCoverage
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store import capacity, former_tiers
from cachefs_daemon.store.block_store import BlockStore
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.maintenance import Maintenance
from cachefs_daemon.store.presence_watch import PresenceWatch
from cachefs_daemon.store.recovery import open_index, reconcile
from cachefs_daemon.store.segment_writer import span
from cachefs_daemon.store.space_reservations import SpaceReservations
from cachefs_daemon.store.state_dir import StateDirectory
from cachefs_daemon.store.tier import Tier, TierConfig, check_budget, check_size
from cachefs_daemon.store.transfers import Transfers


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The configuration of a store."""

    state_dir: Path  # directory of the index and the lock
    block_size: int  # bytes of the largest block
    memory: TierConfig
    ssd: TierConfig | None  # None for a node without an SSD tier


@dataclass(frozen=True, slots=True)
class PlanningParts:
    """The parts that store and planning share: the store's knowledge of the future, and planning's of the store."""

    plan: Plan
    coverage: Coverage
    presence: Presence
    standing: Ownership | None = None  # which blocks this node has to keep; None without other nodes

    @classmethod
    def empty(cls, *, in_cluster: bool = False) -> "PlanningParts":
        """Return an object without plans and pushed pages. in_cluster: other nodes have copies too."""
        plan = Plan()
        return cls(plan, Coverage(plan), Presence(), Ownership() if in_cluster else None)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The use of one tier, in bytes and blocks."""

    name: str
    directory: Path
    budget: int
    limit: int  # the budget after cgroup and free-space limits
    used: int
    blocks: int
    segments: int
    evicted: int
    policy: str
    problem: str  # the reason for which it takes no new blocks; "" while it does


class Storage:
    """The parts of an open store, for the node. Thread-safe.

    Open it before the event loop starts: the index is checked in a child process.
    """

    def __init__(self, config: StoreConfig, planning: PlanningParts) -> None:
        """Open and recover. Raises ConfigError, Busy, or another CachefsError."""
        self.planning = planning
        self._state_dir = config.state_dir
        with ExitStack() as undo:
            self._state = StateDirectory(config.state_dir)
            undo.callback(self._state.close)
            self._tiers: list[Tier] = []
            for number, settings in ((MEMORY, config.memory), (SSD, config.ssd)):
                if settings is not None and (number == MEMORY or settings.budget > 0):
                    self._tiers.append(Tier(number, settings, config.block_size))
                    undo.callback(self._tiers[-1].close)
            self.index = open_index(self._state)
            undo.callback(self.index.close)
            self.tiering = Locked(_open_tiering(self._tiers, self.index, planning, config.block_size))
            transfers = Transfers(self._tiers, self.index, self.tiering)
            self.blocks = BlockStore(self._tiers, self.index, self.tiering, transfers, planning.coverage)
            self.reservations = SpaceReservations(self._tiers, self.index, self.tiering, transfers)
            self.presence_watch = PresenceWatch(planning.presence, self.index, self.tiering)
            self.maintenance = Maintenance(self._tiers, self.index, self.tiering, transfers, self.blocks)
            reconcile(self.index, self._tiers, self.tiering.unlocked.note_recovered)
            for tier in self._tiers:
                self.maintenance.shrink(tier)
            self._remember_tiers(config.state_dir)
            undo.pop_all()

    def _remember_tiers(self, state_dir: Path) -> None:
        try:
            former_tiers.remember(state_dir, [tier.directory for tier in self._tiers])
        except OSError as error:
            raise ConfigError(
                f"state_dir {state_dir} cannot be written: {error.strerror}; free space there, or choose another"
            ) from None

    def report_former_tiers(self) -> threading.Thread:
        """Start a thread that logs former directories of tiers. Nothing waits for the thread, since a disk may hang."""
        current = [tier.directory for tier in self._tiers]
        thread = threading.Thread(
            target=former_tiers.report, args=(self._state_dir, current), name="former-tiers", daemon=True
        )
        thread.start()
        return thread

    @property
    def capacity(self) -> int:
        """Bytes of blocks that all tiers together may take now."""
        return sum(0 if tier.problem else tier.limit for tier in self._tiers)

    def usage(self) -> list[TierUsage]:
        """Return the use of each tier, the memory tier first."""
        counts = self.tiering.unlocked.counts
        return [
            TierUsage(
                tier.name, tier.directory, tier.config.budget, tier.limit, tier.used, counts[tier.number].blocks,
                tier.segments, counts[tier.number].evicted, tier.config.policy, tier.problem,
            )
            for tier in self._tiers
        ]  # fmt: skip

    def resize(self, config: StoreConfig) -> None:
        """Apply budgets and minimum free space of *config*. Raises ConfigError, with nothing changed, where a tier
        cannot have that size."""
        configs = {MEMORY: config.memory, SSD: config.ssd}
        sized = [(tier, found) for tier in self._tiers if (found := configs[tier.number]) is not None]
        for tier, found in sized:
            check_budget(tier.number, found, config.block_size)
            check_size(tier.number, found, capacity.disk_size(found.directory))
        for tier, found in sized:
            tier.resize(dataclasses.replace(tier.config, budget=found.budget, min_free=found.min_free))
        with self.tiering as tiering:
            tiering.set_capacities(_transient_capacity(self._tiers, config.block_size))

    def close(self) -> None:
        """Close the store. Call it last, when no other call is in progress."""
        self.maintenance.close()
        if self.index.close():
            self._state.mark_clean()
        for tier in self._tiers:
            tier.close()
        self._state.close()


def _open_tiering(tiers: Sequence[Tier], index: IndexWriter, foresight: PlanningParts, block_size: int) -> Tiering:
    uses = UseOrder()

    def policies() -> list[EvictionPolicy]:
        opened: list[EvictionPolicy] = []
        for tier in reversed(tiers):
            # Blocks in the page cache need not be in memory twice, where the tier below keeps them.
            below = functools.partial(_kept_below, tiers[SSD], opened[0]) if opened else lambda: -math.inf
            covered = MemoryCoverage(foresight.coverage, below) if tier.number == MEMORY else None
            opened.insert(0, make_policy(tier.config.policy, foresight.plan, covered, uses, foresight.standing))
        return opened

    def location_of(key: bytes) -> TierLocation | None:
        location = index.get(key)
        return TierLocation(location.tier, span(location.length)) if location is not None else None

    capacities = [tier.capacity for tier in tiers]
    quotas = Quotas(capacities, policies, foresight.plan)
    transient = _transient_capacity(tiers, block_size)
    return Tiering(tiers, TierPolicies(policies(), uses), quotas, foresight.presence, location_of, transient)


def _kept_below(tier: Tier, policy: EvictionPolicy) -> float:
    """Return the score below which *tier*, which has that policy, takes a block."""
    if tier.problem or not isinstance(policy, RankedPolicy):
        return -math.inf
    return math.inf if has_free_room(tier) else policy.next_score


def _transient_capacity(tiers: Sequence[Tier], block_size: int) -> int:
    """Return the bytes of the memory tier that transient blocks may take."""
    memory = tiers[MEMORY]
    return transient_room(memory.config.budget, span(block_size), memory.capacity)
