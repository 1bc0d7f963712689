"""Tracks which part of each dataset each Slurm node holds, from the service's answers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from cachefs.scheduling_messages import NodesStatus
from cachefs_scheduler.slurm.feature_names import can_be_feature
from cachefs_scheduler.slurm.levels import LEAST, Levels, levels_of, steady
from cachefs_scheduler.slurm.node_records import Inventory

# Beyond this number, partitions are ignored: thousands of partitions have few distinct node sets.
_MOST_PARTITIONS: Final = 64
# Seconds for which a node's last known contents are kept while the service has not heard it: a restarted service needs
# some seconds to hear all nodes, and without this all features would disappear and return.
_UNHEARD: Final = 120.0


@dataclass
class CachedParts:
    """The cached part of each dataset by node, as of the service's last answer."""

    most: int  # number of datasets
    oldest: float  # seconds for which a node's last report counts
    _parts: dict[str, dict[str, float]] = field(default_factory=dict)  # by dataset and node
    _heard: dict[str, float] = field(default_factory=dict)  # by node: when the service last reported its contents

    def learn(self, status: NodesStatus, now: float) -> None:
        """Record an answer of the service. now: monotonic seconds."""
        heard = {node.name for node in status.nodes if node.age >= 0}
        self._heard.update(dict.fromkeys(heard, now))
        self._heard = {name: at for name, at in self._heard.items() if now - at <= min(_UNHEARD, self.oldest)}
        unheard = self._heard.keys() - heard
        found = {
            dataset: kept
            for dataset, parts in self._parts.items()
            if (kept := {node: part for node, part in parts.items() if node in unheard})
        }
        for node in status.nodes:
            if node.age > self.oldest or node.state in ("away", "draining"):
                continue
            for held in node.datasets:
                if held.total > 0 and held.bytes > 0 and can_be_feature(held.dataset):
                    whole = min(1.0, held.bytes / held.total)
                    part = steady(self._parts.get(held.dataset, {}).get(node.name, 0.0), whole)
                    found.setdefault(held.dataset, {})[node.name] = part
        self._parts = dict(sorted(found.items(), key=_much)[: self.most])

    def levels(self, inventory: Inventory) -> dict[str, Levels]:
        """Return levels by dataset, over nodes that may get jobs."""
        usable = [node.name for node in inventory.nodes if node.usable]
        different = list({frozenset(nodes) for nodes in partitions_of(inventory).values()})
        partitions = different if len(different) <= _MOST_PARTITIONS else []
        found: dict[str, Levels] = {}
        for dataset, parts in self._parts.items():
            here = {name: parts[name] for name in usable if name in parts}
            found[dataset] = levels_of(here, partitions)
        return found


def _much(item: tuple[str, Mapping[str, float]]) -> tuple[float, str]:
    """Return the sort key that puts datasets with more cached data first."""
    dataset, parts = item
    return -sum(part for part in parts.values() if part >= LEAST), dataset


def partitions_of(inventory: Inventory) -> dict[str, Collection[str]]:
    """Return the nodes of each partition that may get jobs; `-` is the default partition."""
    found: dict[str, set[str]] = {}
    for node in inventory.nodes:
        for partition in node.partitions if node.usable else ():
            found.setdefault(partition, set()).add(node.name)
            if partition == inventory.default:
                found.setdefault("-", set()).add(node.name)
    return dict(found)
