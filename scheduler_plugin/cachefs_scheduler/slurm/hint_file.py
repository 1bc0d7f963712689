"""The levels of each dataset's holders, and the hint file from which Lua reads them in the controller.

A Slurm preference selects nodes with a feature, and for a job on N nodes either all or none must have it. So a feature
is useful if at least N nodes have it, and as few more as possible: `top4` is for jobs on up to four nodes. From
`[cachefs_x_top1|cachefs_x_top2|cachefs_x_some]`, Slurm takes the first level with room. `divide_holders` divides the
holders of a dataset into such nested sets of nodes. The file:

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOME: Final = "some"
FULL: Final = "full"
TOPS: Final = (1, 2, 4, 8, 16, 32, 64)
# Fractions of a dataset. Nodes that differ by less than EQUAL_SHARE count as equal; nodes below MIN_SHARE, or below
# _MIN_OF_BEST of the best node's part, count as empty.
EQUAL_SHARE: Final = 0.05
MIN_SHARE: Final = 0.01
_MIN_OF_BEST: Final = 0.1
_FULL_SHARE: Final = 0.95
# Nodes per dataset, the best ones.
MAX_NODES: Final = 1024
# Lua reads one megabyte.
MAX_BYTES: Final = 1_000_000
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_UPTIME: Final = Path("/proc/uptime")
_HEAD: Final = re.compile(
    r"cachefs-hints 1\nwritten (?P<written>\d{1,12}) (?P<uptime>\d{1,12}\.\d+) (?P<boot>\S+)\n"
    r"lasts (?P<lasts>\d{1,9})\n"
)


@dataclass(frozen=True, slots=True)
class HolderLevels:
    """The holders of each level of a dataset."""

    # From the best level to the widest, each a subset of the next one.
    nested: Mapping[str, frozenset[str]]
    # Nodes that hold at least _FULL_SHARE of it; for users' constraints, not for preferences.
    full: frozenset[str]

    def levels_of_node(self, node: str) -> Iterable[str]:
        """Yield the levels that a node has."""
        for level, nodes in self.nested.items():
            if node in nodes:
                yield level
        if node in self.full:
            yield FULL

    def counts(self, nodes: Collection[str] | None) -> tuple[tuple[str, int], ...]:
        """Return by level how many of *nodes* have it; None: of all nodes."""
        return tuple(
            (level, len(having) if nodes is None else len(having.intersection(nodes)))
            for level, having in self.nested.items()
        )


def divide_holders(parts: Mapping[str, float], partitions: Iterable[Collection[str]]) -> HolderLevels:
    """Return the levels of a dataset: in each partition, the best N nodes have level topN.

    parts: by node that may get jobs, the fraction of the dataset that it holds. partitions: nodes of each.
    """
    best = max(parts.values(), default=0.0)
    least = max(MIN_SHARE, _MIN_OF_BEST * best)
    having = [node for node in parts if parts[node] >= least]
    ranked = sorted(having, key=lambda node: (-parts[node], node))[:MAX_NODES]
    some = frozenset(ranked)
    if not some:
        return HolderLevels({}, frozenset())
    lists = [[node for node in ranked if node in within] for within in map(frozenset, partitions)]
    nested: dict[str, frozenset[str]] = {}
    before: frozenset[str] = frozenset()
    for count in TOPS:
        best_ones = frozenset(node for each in lists or [ranked] for node in _best_nodes(each, count, parts))
        if best_ones == some:
            break
        if best_ones and best_ones != before:
            nested[f"top{count}"] = before = best_ones
    nested[SOME] = some
    return HolderLevels(nested, frozenset(node for node in ranked if parts[node] >= _FULL_SHARE))


def _best_nodes(ranked: Sequence[str], count: int, parts: Mapping[str, float]) -> Iterable[str]:
    """Return the best *count* nodes, and nodes equal to the last of them."""
    if count >= len(ranked):
        return ranked
    bar = parts[ranked[count - 1]] - EQUAL_SHARE
    return [node for node in ranked if parts[node] >= bar]


def damped_share(before: float, now: float) -> float:
    """Return the earlier value unless the change matters: otherwise features would change with each block."""
    edge = (now >= _FULL_SHARE) != (before >= _FULL_SHARE) or (now < MIN_SHARE) != (before < MIN_SHARE)
    return now if edge or abs(now - before) >= EQUAL_SHARE / 2 else before


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
