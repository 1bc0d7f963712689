"""What the mount process counts; cumulative since it started, sent to the daemon with every report."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """requests: FUSE requests in all, and by kind below; hits: reads answered from a tier of this node without asking
    the daemon; misses: reads that had to wait for a fetch; bad: copies that failed verification; errors: requests
    answered with an error other than "no such name"."""

    requests: int = 0
    lookup: int = 0
    getattr: int = 0
    readdir: int = 0
    read: int = 0
    open: int = 0
    opendir: int = 0
    statfs: int = 0
    getxattr: int = 0
    other: int = 0
    hits_memory: int = 0
    hits_ssd: int = 0
    hit_bytes_memory: int = 0
    hit_bytes_ssd: int = 0
    misses: int = 0
    miss_bytes: int = 0
    bad: int = 0
    errors: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def hit(self, tier: int, size: int) -> None:
        if tier == 0:
            self.hits_memory += 1
            self.hit_bytes_memory += size
        else:
            self.hits_ssd += 1
            self.hit_bytes_ssd += size
