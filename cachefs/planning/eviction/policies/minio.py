"""Keeps the blocks that came first, for ever.

Under epochs that each read everything once in a new random order, any fixed set of blocks gives the best hit ratio a
single node can have, and LRU gives nearly none (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021, section 4.1). The policy needs no memory per block.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Final


class Minio:
    """Takes blocks while there is room for them, and never evicts one."""

    name: ClassVar = "minio"
    description: ClassVar = "keeps the blocks that came first"
    can_evict: Final = False

    def can_admit(self, key: bytes, size: int, free: int) -> bool:
        return size <= free

    def note_added(self, key: bytes, size: int) -> None:
        pass

    def note_accessed(self, key: bytes) -> None:
        pass

    def note_removed(self, key: bytes) -> None:
        pass

    def rank_incoming(self, keys: Sequence[bytes], pinned: Collection[bytes]) -> list[int]:
        return []

    def choose_victims(self, size: int, pinned: Collection[bytes], incoming: Sequence[bytes] = ()) -> Sequence[bytes]:
        return ()

    def replaceable_bytes(self, incoming: bytes) -> int:
        return 0

    def catch_up(self) -> bool:
        return False

    def last_use(self, key: bytes) -> int | None:
        return None
