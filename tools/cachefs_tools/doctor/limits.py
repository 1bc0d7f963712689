"""Checks limits of this process and its control groups: open files, memory."""

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from cachefs.cgroup import memory_limits
from cachefs.sizes import format_size
from cachefs_tools.doctor.finding import Finding, Level, note, ok, warning

# The daemon opens segments, snapshots and connections; mounts open segments and clones of the device.
ENOUGH_FILES: Final = 65536
# Enough for a node with a few datasets and jobs.
MIN_FILES: Final = 16384
_HEADROOM: Final = 256 << 20


class LimitFacts(msgspec.Struct, frozen=True):
    """Facts about limits."""

    # Hard limit of open files, of the daemon if visible, else of this process.
    files: int
    files_of_daemon: bool
    # Bytes of the machine's memory: total and available.
    memory: int
    available: int
    processors: int
    # (limit, bytes held) of each control group that limits this process's memory.
    groups: Sequence[tuple[int, int]] = ()


def gather(daemon: object) -> LimitFacts:
    """Gather facts. daemon: its process id; 0: not running."""
    files, seen = resource.getrlimit(resource.RLIMIT_NOFILE)[1], False
    if isinstance(daemon, int) and daemon > 0:
        with contextlib.suppress(OSError, ValueError):  # not visible to this user
            files, seen = resource.prlimit(daemon, resource.RLIMIT_NOFILE)[1], True
    page = os.sysconf("SC_PAGE_SIZE")
    return LimitFacts(
        files=files if files != resource.RLIM_INFINITY else 1 << 62,
        files_of_daemon=seen,
        memory=page * os.sysconf("SC_PHYS_PAGES"),
        available=_available_memory() or page * os.sysconf("SC_AVPHYS_PAGES"),
        processors=len(os.sched_getaffinity(0)),
        groups=list(memory_limits()),
    )


def findings(facts: LimitFacts, memory_budget: int) -> Iterator[Finding]:
    """Yield findings. memory_budget: of the memory tier in bytes; 0: unknown."""
    whose = "the daemon" if facts.files_of_daemon else "this shell"
    shown = f"{facts.files:,}" if facts.files < 1 << 60 else "any number of"
    if facts.files < ENOUGH_FILES:
        yield Finding(
            "limits.files",
            Level.WARNING if facts.files_of_daemon and facts.files < MIN_FILES else Level.NOTE,
            f"{whose} may have {shown} files open (hard limit)",
            "a daemon or mount with many snapshots, tiers of TiB or thousands of readers cannot open more",
            f"LimitNOFILE={ENOUGH_FILES} in the unit, or ulimit -Hn {ENOUGH_FILES}",
        )
    else:
        yield ok("limits.files", f"{whose} may have {shown} files open")
    yield from _group_findings(facts, memory_budget)
    if memory_budget > facts.memory:
        yield warning(
            "limits.memory",
            f"the memory tier may take {format_size(memory_budget)}, and the machine has {format_size(facts.memory)}",
            "the tier takes what there is, and jobs have less",
            "lower memory.budget",
        )
    else:
        yield ok(
            "limits.memory",
            f"{format_size(facts.memory)} of memory, {format_size(facts.available)} available, "
            f"{facts.processors} processors",
        )


def _group_findings(facts: LimitFacts, memory_budget: int) -> Iterator[Finding]:
    if not facts.groups:
        return
    limit, used = min(facts.groups, key=lambda each: each[0] - each[1])
    text = f"a control group allows {format_size(limit)} of memory, of which {format_size(used)} is held"
    if limit - used < min(_HEADROOM, limit // 8):
        yield warning(
            "limits.cgroup",
            text,
            "the memory tier shrinks to nothing, and the kernel may kill the daemon or jobs beside it",
            "raise the limit (MemoryMax=, --memory, resources.limits.memory)",
        )
    elif memory_budget > limit:
        yield warning(
            "limits.cgroup",
            f"{text}; the memory tier may take {format_size(memory_budget)}",
            "blocks of the memory tier count, so the tier is smaller than its budget",
            "raise the limit, or lower memory.budget",
        )
    else:
        yield note("limits.cgroup", text)


def _available_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
