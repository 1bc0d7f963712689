"""The hint file that Lua reads in the controller: the levels of each dataset, and their numbers of nodes.

    cachefs-hints 1
    written SECONDS UPTIME BOOT      when the service answered: Unix time, uptime of the machine, boot id
    lasts SECONDS                    after which Lua ignores the file
    steer yes|no                     whether jobs may get preferences
    wait begin|hold SECONDS          how jobs wait, and by how much a begin time is postponed
    cpus COUNT                       the most processors of a node
    set DATASET PARTITION LEVEL=NODES ...    from the best level to the widest
    end

PARTITION `*` stands for all nodes, and `-` for the default partition.
"""

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs_scheduler.slurm.levels import HolderLevels

# Lua reads one megabyte.
MAX_BYTES: Final = 1_000_000
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_UPTIME: Final = Path("/proc/uptime")
_HEAD: Final = re.compile(
    r"cachefs-hints 1\nwritten (?P<written>\d{1,12}) (?P<uptime>\d{1,12}\.\d+) (?P<boot>\S+)\n"
    r"lasts (?P<lasts>\d{1,9})\n"
)


@dataclass(frozen=True, slots=True)
class HintStamp:
    """A time on two clocks. Readers on this machine use the uptime, which is immune to clock changes."""

    seconds: int
    uptime: float
    boot: str

    @classmethod
    def current(cls) -> "HintStamp":
        """Return the present time."""
        return cls(int(time.time()), float(_UPTIME.read_text().split()[0]), _BOOT.read_text().strip())


@dataclass(frozen=True, slots=True)
class HintHeading:
    """The contents of the file apart from datasets."""

    stamp: HintStamp
    lasts: int
    steer: bool
    wait: str
    wait_for: int
    cpus: int


def hints_text(
    heading: HintHeading, sets: Mapping[str, HolderLevels], partitions: Mapping[str, Collection[str]]
) -> str:
    """Return the file's text. If it would be too large, partitions are left out first, then the last datasets.

    partitions: nodes of each partition, with `-` for the default one.
    """
    stamp = heading.stamp
    lines = [
        "cachefs-hints 1",
        f"written {stamp.seconds} {stamp.uptime:.2f} {stamp.boot}",
        f"lasts {heading.lasts}",
        f"steer {'yes' if heading.steer else 'no'}",
        f"wait {heading.wait} {heading.wait_for}",
        f"cpus {heading.cpus}",
    ]
    room = MAX_BYTES - sum(len(line) + 1 for line in lines) - 5
    for line in _set_lines(sets, partitions):
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(line)
    return "\n".join([*lines, "end", ""])


def _set_lines(sets: Mapping[str, HolderLevels], partitions: Mapping[str, Collection[str]]) -> Iterator[str]:
    everywhere = {dataset: levels.counts(None) for dataset, levels in sets.items()}
    for dataset, counts in everywhere.items():
        yield f"set {dataset} * {_level_counts(counts)}"
    for partition, nodes in partitions.items():
        for dataset, levels in sets.items():
            counts = levels.counts(nodes)
            if counts != everywhere[dataset]:
                yield f"set {dataset} {partition} {_level_counts(counts)}"


def _level_counts(counts: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{level}={count}" for level, count in counts)


def age_and_lifetime(path: Path) -> tuple[float, float] | None:
    """Return the age of the service's answer in seconds, and for how many seconds Lua accepts it; None if there is no
    such file. Blocking."""
    try:
        with path.open(errors="replace") as file:
            found = _HEAD.match(file.read(500))
        boot, uptime = _BOOT.read_text().strip(), float(_UPTIME.read_text().split()[0])
    except OSError:
        return None
    if found is None:
        return None
    age = uptime - float(found["uptime"]) if found["boot"] == boot else time.time() - float(found["written"])
    return max(0.0, age), float(found["lasts"])


def write_hints(path: Path, text: str) -> None:
    """Replace the file atomically. Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w") as file:
        file.write(text)
        os.fchmod(descriptor, 0o644)
    new.replace(path)
