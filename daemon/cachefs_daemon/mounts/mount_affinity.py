"""Determines through which mounts of the node each consumer reads, from the reads that were its own. No I/O."""

from collections.abc import Container, Mapping, Sequence
from typing import Final

from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs.planning.pagecache.push_plan import MountConsumers

# Fewer reads prove nothing: a user may look at a file or two through another mount.
_MIN_READS: Final = 16
# After this many reads, earlier ones count half.
_MAX_READS: Final = 256
# A mount counts if it had this share of the reads: some reads through other mounts fit a sequence by chance.
_SHARE: Final = 1 / 8


class MountAffinity:
    """Records the mounts through which each consumer reads, the only ones in which pages pushed for it are of use.
    Silence changes nothing: a consumer whose pages are all pushed is not seen to read."""

    def __init__(self) -> None:
        self._reads: dict[str, dict[str, float]] = {}  # by consumer and mount: reads, the earlier ones halved

    def note_reads(self, mount: str, own_reads: Mapping[str, int]) -> None:
        """Record own_reads: by consumer, how many of its own reads came through *mount*."""
        for consumer, count in own_reads.items():
            if count > 0:
                self._note_reads_of(mount, consumer, count)

    def _note_reads_of(self, mount: str, consumer: str, count: int) -> None:
        reads = self._reads.setdefault(consumer, {})
        reads[mount] = reads.get(mount, 0) + count
        if sum(reads.values()) > _MAX_READS:
            self._reads[consumer] = {mount: count / 2 for mount, count in reads.items() if count > 1}

    def mounts_of(self, consumer: str) -> frozenset[str]:
        """Return the ids of the mounts through which the consumer reads; none while unknown."""
        reads = self._reads.get(consumer, {})
        total = sum(reads.values())
        if total < _MIN_READS:
            return frozenset()
        least = _SHARE * total
        return frozenset(mount for mount, count in reads.items() if count >= least)

    def consumers_of(self, mount: str, readers: Sequence[PushReader]) -> MountConsumers:
        """Return the audience of *mount*. readers: all readers of snapshots that it shows."""
        here = [reader for reader in readers if not (known := self.mounts_of(reader.key)) or mount in known]
        return MountConsumers(here, frozenset(one.snapshot for one in readers) - {one.snapshot for one in here})

    def forget_others(self, consumers: Container[str]) -> None:
        """Forget all consumers but these."""
        self._reads = {consumer: reads for consumer, reads in self._reads.items() if consumer in consumers}
