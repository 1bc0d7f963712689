"""Policies: decide which blocks a tier takes, and which it evicts.

The store calls a policy under its lock, and a simulator can call the very same object in a loop. Sizes are bytes as
accounted by the tier. May import cachefs.planning.pagecache, .cluster, .sequences and .blocks.

A new policy is a module with its class, which has its name and description, and an entry in _FACTORIES. The
documentation and the choices of the configuration and of cachefs-bench are made from the classes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Final, Protocol

from cachefs.errors import ConfigError
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.eviction.policies.alsd import Alsd
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.policies.lru import Lru, UseOrder
from cachefs.planning.eviction.policies.minio import Minio
from cachefs.planning.pagecache.states import MemoryCoverage
from cachefs.planning.sequences.plan import Plan


class EvictionPolicy(Protocol):
    """The decisions of one tier."""

    @property
    def can_evict(self) -> bool:
        """False where the policy never evicts, so that room must be held back for transient blocks. May change with the
        plan."""
        ...

    def can_admit(self, key: bytes, size: int, free: int) -> bool:
        """Return whether the tier should take this block, given *free* bytes and the right to evict
        `choose_victims`."""
        ...

    def note_added(self, key: bytes, size: int) -> None:
        """Record that the tier has taken the block."""
        ...

    def note_accessed(self, key: bytes) -> None:
        """Record a use by a reader. Unknown keys are ignored."""
        ...

    def note_removed(self, key: bytes) -> None:
        """Record that the block left the tier. Unknown keys are ignored."""
        ...

    def rank_incoming(self, keys: Sequence[bytes], pinned: Collection[bytes]) -> list[int]:
        """Return which of these blocks (as indices in *keys*) may be worth more to the policy than some that it has,
        most wanted first. For the others it would evict nothing."""
        ...

    def choose_victims(self, size: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()) -> Sequence[bytes]:
        """Return blocks to evict so that at least *size* bytes come free: enough of them, or none where that is
        impossible, or where the policy prefers one of them to any of *incoming*. There may be more after `catch_up` was
        True."""
        ...

    def catch_up(self) -> bool:
        """Process a part of the work that a change of the plan has left. Returns False where there was none. Each call
        takes some milliseconds at most, as the store calls it under its lock."""
        ...

    def replaceable_bytes(self, incoming: bytes) -> int:
        """Return about how many bytes the policy would evict for this block."""
        ...

    def last_use(self, key: bytes) -> int | None:
        """Return the block's number in `UseOrder`; None where the policy does not have it, or does not track uses."""
        ...


class ConfigurablePolicy(EvictionPolicy, Protocol):
    """A policy that the configuration can name."""

    # Name in the configuration.
    name: ClassVar[str]
    # A clause whose subject is the policy: Markdown.
    description: ClassVar[str]


_PolicyFactory = Callable[[Plan, MemoryCoverage | None, UseOrder | None, Ownership | None], EvictionPolicy]

_FACTORIES: Final[Mapping[type[ConfigurablePolicy], _PolicyFactory]] = {
    Clairvoyant: lambda plan, cached, uses, standing: Clairvoyant(plan, cached, standing),
    Alsd: lambda plan, cached, uses, standing: Alsd(plan, cached, standing),
    Minio: lambda plan, cached, uses, standing: Minio(),
    Lru: lambda plan, cached, uses, standing: Lru(uses),
}
# All policies by name.
POLICIES: Final[Mapping[str, type[ConfigurablePolicy]]] = {policy.name: policy for policy in _FACTORIES}


def make_policy(
    name: str,
    plan: Plan,
    coverage: MemoryCoverage | None = None,
    uses: UseOrder | None = None,
    ownership: Ownership | None = None,
) -> EvictionPolicy:
    """Return a policy for one tier. Policies that use the future take it from *plan*. They evict first blocks that are
    *coverage* in page caches and kept below, or in a cluster blocks that are not this node's to keep according to
    *ownership*. uses: the order of uses, shared by the tiers between which blocks move. Raises ConfigError for an
    unknown name."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"policy {name!r} does not exist; choose one of: {', '.join(POLICIES)}")
    return _FACTORIES[policy](plan, coverage, uses, ownership)
