"""How much of the page cache pushed pages may take.

A share of the memory that is available when the mount starts, and always so much less than what is available that a
tenth of the machine (or of its control group) stays for others. The pages themselves count as available, since the
kernel can have them back at once; so filling the budget does not lower it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.cgroup import memory_limits
from cachefs.sizes import Share

_FOR_OTHERS: Final = 10  # the part of all memory, 1/10
# The part of the budget by which it grows again in a second, 1/50: pressure that has just ended often comes back.
_GROWTH: Final = 50


@dataclass(frozen=True, slots=True)
class Memory:
    """What a machine or a control group has, and what of it can be had now, in bytes."""

    total: int
    available: int


def memory(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> list[Memory]:
    """Of this machine and of each limited control group we are in. Raises OSError, ValueError."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    groups = [Memory(limit, limit - held) for limit, held in memory_limits(proc, sys) if limit < total]
    return [Memory(total, available), *groups]


class Budget:
    """most: bytes in good times; now: bytes at this moment."""

    def __init__(self, share: Share, found: Sequence[Memory]) -> None:
        self.most = share.of(max(0, min(one.available for one in found)))
        self.now = min(self.most, _room(found))

    def update(self, found: Sequence[Memory]) -> None:
        """Once a second."""
        self.now = min(self.most, self.now + self.most // _GROWTH, _room(found))


def _room(found: Sequence[Memory]) -> int:
    return max(0, min(one.available - one.total // _FOR_OTHERS for one in found))
