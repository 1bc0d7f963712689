"""The configuration file of a scratch node's daemon."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of one tier."""

    budget: int  # bytes; 0: there is no such tier (SSD only)
    segment_size: int = 0  # bytes of a segment file; 0: the daemon's default


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of a daemon, except for the paths of its files."""

    memory: TierSettings
    ssd: TierSettings
    block_size: int = 0  # bytes; 0: the daemon's default
    policy: str = ""  # eviction policy; empty: the daemon's default
    read_deadline: float = 0  # seconds; 0: the daemon's default
    guess: bool = True  # whether it reads ahead for programs that have published nothing
    # Keys of [cluster]; empty: no cluster.
    cluster: Mapping[str, object] = field(default_factory=dict)


def configuration_text(work: Path, memory: Path, settings: NodeSettings) -> str:
    """Return the text of the file. The memory tier is in the directory *memory*, everything else in *work*."""
    daemon = {"socket": str(work / "cachefsd.sock"), "state_dir": str(work / "state")}
    sections: dict[str, Mapping[str, object]] = {
        "daemon": {
            **daemon, "block_size": settings.block_size, "policy": settings.policy,
            "read_deadline": settings.read_deadline,
        },
        "memory": {"dir": str(memory), **_tier(settings.memory)},
        "ssd": {"dir": str(work / "ssd"), "min_free": 0, **_tier(settings.ssd)},
    }  # fmt: skip
    if not settings.guess:
        sections["prefetch"] = {"guess": False}
    if settings.cluster:
        sections["cluster"] = dict(settings.cluster)
    return "\n".join(_section(name, values) for name, values in sections.items())


def _tier(settings: TierSettings) -> dict[str, int]:
    return {"budget": settings.budget, "segment_size": settings.segment_size}


def _section(name: str, values: Mapping[str, object]) -> str:
    """Return one table of the file, without settings left to the daemon."""
    given = {key: value for key, value in values.items() if value or key in ("budget", "min_free", "guess")}
    return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in given.items())
