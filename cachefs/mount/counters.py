"""The counters of a mount's worker: cumulative since its start, and sent to the daemon with every report."""

from dataclasses import asdict, dataclass

from cachefs.block import MEMORY


@dataclass(slots=True)
class Counters:
    """Counts requests. `cachectl` and the daemon use the same names."""

    # FUSE requests, all of them and by their kind.
    requests: int = 0
    lookup: int = 0
    getattr: int = 0
    readdir: int = 0
    read: int = 0
    open: int = 0
    opendir: int = 0
    statfs: int = 0
    getxattr: int = 0
    # Counted with zero-open only.
    ioctl: int = 0
    other: int = 0
    # Reads that were answered from a tier of this node without asking the daemon, and their bytes.
    hits_memory: int = 0
    hits_ssd: int = 0
    hit_bytes_memory: int = 0
    hit_bytes_ssd: int = 0
    # Reads that had to wait for a fetch, and their bytes.
    misses: int = 0
    miss_bytes: int = 0
    # Copies in a tier that failed verification.
    bad: int = 0
    # Requests that were answered with an error other than "no such name".
    errors: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def count_hit(self, tier: int, size: int) -> None:
        """Count a read of *size* bytes answered from *tier* (cachefs.block)."""
        if tier == MEMORY:
            self.hits_memory += 1
            self.hit_bytes_memory += size
        else:
            self.hits_ssd += 1
            self.hit_bytes_ssd += size
