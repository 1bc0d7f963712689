"""The budget of pushed pages in the page cache.

The budget is a share of the memory available when the mount starts. It is reduced so that a tenth of the machine's (or
the control group's) memory stays available for others. Pushed pages count as available memory, since the kernel can
reclaim them at once; filling the budget therefore does not lower it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.cgroup import memory_limits
from cachefs.sizes import SizeSetting

_OTHERS_DIVISOR: Final = 10  # 1/10 of all memory
# The budget regrows by 1/50 of its largest size per second: memory that has just become free is often taken again.
_GROWTH_DIVISOR: Final = 50


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Total and available memory of a machine or of a control group, in bytes."""

    total: int
    available: int


def read_memory(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> list[MemoryState]:
    """Return the memory of this machine, and of each of its control groups with a limit. Raises OSError, ValueError."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    groups = [MemoryState(limit, limit - held) for limit, held in memory_limits(proc, sys) if limit < total]
    return [MemoryState(total, available), *groups]


class PageCacheBudget:
    """The budget of one mount."""

    def __init__(self, share: SizeSetting, found: Sequence[MemoryState]) -> None:
        self.max_bytes = share.resolve(max(0, min(one.available for one in found)))  # bytes, while memory is not short
        self.current_bytes = min(self.max_bytes, _spare_bytes(found))  # current bytes

    def update_budget(self, found: Sequence[MemoryState]) -> None:
        """Adapt the budget to the memory *found*. To be called once a second."""
        self.current_bytes = min(
            self.max_bytes, self.current_bytes + self.max_bytes // _GROWTH_DIVISOR, _spare_bytes(found)
        )


def _spare_bytes(found: Sequence[MemoryState]) -> int:
    return max(0, min(one.available - one.total // _OTHERS_DIVISOR for one in found))
