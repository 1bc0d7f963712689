"""Policies: which blocks a tier takes, and which it evicts.

The store calls a policy under its lock, and a simulator can call the very same object in a loop. Sizes are bytes as the
tier accounts for them. May import cachefs.planning.pagecache, .cluster, .sequences and .blocks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

from cachefs.errors import ConfigError
from cachefs.planning.cluster.standing import Standing
from cachefs.planning.eviction.policies.alsd import Alsd
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.policies.fifo import Fifo
from cachefs.planning.eviction.policies.lfu import Lfu
from cachefs.planning.eviction.policies.lru import Lru
from cachefs.planning.eviction.policies.minio import Minio
from cachefs.planning.eviction.policies.refcount import Refcount
from cachefs.planning.eviction.policies.uses import Uses
from cachefs.planning.pagecache.coverage import MemoryCoverage
from cachefs.planning.sequences.plan import Plan


class PolicyName(StrEnum):
    """As the configuration calls them."""

    CLAIRVOYANT = "clairvoyant"
    ALSD = "alsd"
    REFCOUNT = "refcount"
    MINIO = "minio"
    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"


class Policy(Protocol):
    """The decisions of one tier."""

    @property
    def evicts(self) -> bool:
        """False where the policy keeps what it has, so that room must be held back for transient blocks. It may change
        when the plan does."""
        ...

    def admits(self, key: bytes, size: int, free: int) -> bool:
        """Should the tier take this block, given *free* bytes and the right to evict `victims`?"""
        ...

    def added(self, key: bytes, size: int) -> None:
        """The tier has taken the block."""
        ...

    def accessed(self, key: bytes) -> None:
        """A reader used the block. Unknown keys are ignored."""
        ...

    def removed(self, key: bytes) -> None:
        """The block left the tier. Unknown keys are ignored."""
        ...

    def preferred(self, keys: Sequence[bytes], pinned: Collection[bytes]) -> list[int]:
        """Which of these blocks (by their places in *keys*) may be worth more to it than some that it has, those it
        wants most first. None of the others would it evict anything for."""
        ...

    def victims(self, size: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()) -> Sequence[bytes]:
        """Blocks to evict so that at least *size* bytes come free: enough of them, or none where that is impossible, or
        where the policy would rather keep one of them than have each of *incoming*. There may be more after `catch_up`
        was True."""
        ...

    def catch_up(self) -> bool:
        """Do some of what a change of the plan has left to do. False where nothing was left. Each call takes some
        milliseconds at most, as the store calls it under its lock."""
        ...

    def replaceable(self, incoming: bytes) -> int:
        """About how many bytes it would evict for this block."""
        ...

    def last_use(self, key: bytes) -> int | None:
        """The block's number in `Uses`; None where the policy does not have it, or goes by something else."""
        ...


_Maker = Callable[[Plan, MemoryCoverage | None, Uses | None, Standing | None], Policy]

POLICIES: Final[Mapping[PolicyName, _Maker]] = {
    PolicyName.CLAIRVOYANT: lambda plan, cached, uses, standing: Clairvoyant(plan, cached, standing),
    PolicyName.ALSD: lambda plan, cached, uses, standing: Alsd(plan, cached, standing),
    PolicyName.REFCOUNT: lambda plan, cached, uses, standing: Refcount(plan, cached, standing),
    PolicyName.MINIO: lambda plan, cached, uses, standing: Minio(),
    PolicyName.LRU: lambda plan, cached, uses, standing: Lru(uses),
    PolicyName.LFU: lambda plan, cached, uses, standing: Lfu(),
    PolicyName.FIFO: lambda plan, cached, uses, standing: Fifo(uses),
}


def open_policy(
    name: str,
    plan: Plan,
    cached: MemoryCoverage | None = None,
    uses: Uses | None = None,
    standing: Standing | None = None,
) -> Policy:
    """The policy of one tier. Policies that know the future know it from *plan*, and evict first what is
    *cached* and kept below, or in a cluster what is not this node's to keep, as *standing* says. uses: what tiers have
    in common between which blocks move. Raises ConfigError for a name that is not in POLICIES."""
    try:
        return POLICIES[PolicyName(name)](plan, cached, uses, standing)
    except ValueError:
        raise ConfigError(f"policy {name!r} does not exist; choose one of: {', '.join(POLICIES)}") from None
