"""Policies: which blocks a tier takes, and which it gives up.

A policy does no I/O, has no clock and no lock of its own: the store calls it under its lock, a simulator calls the very
same object in a loop. Sizes are bytes as the tier accounts for them.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Protocol

from cachefs.errors import ConfigError
from cachefs_daemon.policy.lru import Lru
from cachefs_daemon.policy.minio import Minio


class Policy(Protocol):
    """The decisions of one tier.

    evicts: False where the policy keeps what it has, so that the store must hold room back for passing blocks.
    """

    @property
    def evicts(self) -> bool: ...

    def admits(self, key: bytes, size: int, free: int) -> bool:
        """Should the tier take this block, given *free* bytes and the right to evict `victims`?"""
        ...

    def added(self, key: bytes, size: int) -> None: ...

    def accessed(self, key: bytes) -> None:
        """A reader used the block. Unknown keys are ignored."""
        ...

    def removed(self, key: bytes) -> None:
        """The block left the tier. Unknown keys are ignored."""
        ...

    def victims(self, size: int, pinned: Container[bytes]) -> Sequence[bytes]:
        """Blocks to give up so that at least *size* bytes come free: all of them, or none where that is impossible."""
        ...


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {"minio": Minio, "lru": Lru}


def open_policy(name: str) -> Policy:
    """Raises ConfigError for a name that is not in POLICIES."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ConfigError(f"policy {name!r} does not exist; choose one of: {', '.join(POLICIES)}") from None
