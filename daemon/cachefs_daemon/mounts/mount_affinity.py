"""Through which mounts of the node a consumer reads: told from the reads that were its own. No I/O."""

from typing import Final

# Fewer say nothing: somebody looks at a file or two through another mount.
_FEWEST: Final = 16
# Of so many reads, the later ones count for more than those before.
_REMEMBERED: Final = 256
# A mount counts if it had this share of them: some reads of others' mounts fit a sequence by chance.
_SHARE: Final = 1 / 8


class MountAffinity:
    """Pages that are pushed for a consumer are of use in these mounts only. Silence changes nothing: a consumer whose
    pages are all pushed is not seen to read."""

    def __init__(self) -> None:
        self._reads: dict[str, float] = {}

    def note(self, mount: str, reads: int) -> None:
        """*reads* of the consumer's own came through *mount*."""
        if reads <= 0:
            return
        self._reads[mount] = self._reads.get(mount, 0) + reads
        if sum(self._reads.values()) > _REMEMBERED:
            self._reads = {mount: reads / 2 for mount, reads in self._reads.items() if reads > 1}

    @property
    def mounts(self) -> frozenset[str]:
        """Their ids; none while nobody knows."""
        total = sum(self._reads.values())
        if total < _FEWEST:
            return frozenset()
        least = _SHARE * total
        return frozenset(mount for mount, reads in self._reads.items() if reads >= least)
