"""Through which mounts of the node each consumer reads, as the reads that were its own tell. No I/O."""

from collections.abc import Container, Mapping, Sequence
from typing import Final

from cachefs.planning.pagecache.lookahead import Reader
from cachefs.planning.pagecache.push_plan import Audience

# Fewer reads say nothing: somebody looks at a file or two through another mount.
_FEWEST: Final = 16
# After so many reads the earlier ones count half.
_REMEMBERED: Final = 256
# A mount counts if it had this share of them: some reads of others' mounts fit a sequence by chance.
_SHARE: Final = 1 / 8


class MountAffinity:
    """Pages that are pushed for a consumer are of use in the mounts through which it reads, and in no others. Silence
    changes nothing: a consumer whose pages are all pushed is not seen to read."""

    def __init__(self) -> None:
        self._reads: dict[str, dict[str, float]] = {}  # by consumer and mount: reads, the earlier ones halved

    def note(self, mount: str, own_reads: Mapping[str, int]) -> None:
        """own_reads: by consumer, how many of its own reads came through *mount*."""
        for consumer, count in own_reads.items():
            if count > 0:
                self._note(mount, consumer, count)

    def _note(self, mount: str, consumer: str, count: int) -> None:
        reads = self._reads.setdefault(consumer, {})
        reads[mount] = reads.get(mount, 0) + count
        if sum(reads.values()) > _REMEMBERED:
            self._reads[consumer] = {mount: count / 2 for mount, count in reads.items() if count > 1}

    def mounts_of(self, consumer: str) -> frozenset[str]:
        """Ids of the mounts through which the consumer reads; none while nobody knows."""
        reads = self._reads.get(consumer, {})
        total = sum(reads.values())
        if total < _FEWEST:
            return frozenset()
        least = _SHARE * total
        return frozenset(mount for mount, count in reads.items() if count >= least)

    def audience(self, mount: str, readers: Sequence[Reader]) -> Audience:
        """readers: all those of snapshots that *mount* shows."""
        here = [reader for reader in readers if not (known := self.mounts_of(reader.key)) or mount in known]
        return Audience(here, frozenset(one.snapshot for one in readers) - {one.snapshot for one in here})

    def forget_others(self, consumers: Container[str]) -> None:
        """Forget all consumers but these."""
        self._reads = {consumer: reads for consumer, reads in self._reads.items() if consumer in consumers}
