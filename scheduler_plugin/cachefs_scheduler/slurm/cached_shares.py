"""Tracks which part of each dataset each Slurm node holds, from the service's answers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from cachefs.scheduling_messages import NodesStatus
from cachefs_scheduler.slurm.feature_names import can_be_feature
from cachefs_scheduler.slurm.levels import MIN_SHARE, HolderLevels, damped_share, divide_holders
from cachefs_scheduler.slurm.node_records import Inventory

# Beyond this number, partitions are ignored: thousands of partitions have few distinct node sets.
_MAX_PARTITIONS: Final = 64
# Seconds for which a node's last known contents are kept while the service has not heard it: a restarted service needs
# some seconds to hear all nodes, and without this all features would disappear and return.
_KEPT_SECONDS: Final = 120.0


@dataclass
class CachedShares:
    """The cached part of each dataset by node, as of the service's last answer."""

    max_datasets: int  # number of datasets
    max_age: float  # seconds for which a node's last report counts
    _shares: dict[str, dict[str, float]] = field(default_factory=dict)  # by dataset and node
    _reported_at: dict[str, float] = field(default_factory=dict)  # by node: when the service last reported its contents

    def record_status(self, status: NodesStatus, now: float) -> None:
        """Record an answer of the service. now: monotonic seconds."""
        heard = {node.name for node in status.nodes if node.age >= 0}
        self._reported_at.update(dict.fromkeys(heard, now))
        self._reported_at = {
            name: at for name, at in self._reported_at.items() if now - at <= min(_KEPT_SECONDS, self.max_age)
        }
        unheard = self._reported_at.keys() - heard
        found = {
            dataset: kept
            for dataset, parts in self._shares.items()
            if (kept := {node: part for node, part in parts.items() if node in unheard})
        }
        for node in status.nodes:
            if node.age > self.max_age or node.state in ("away", "draining"):
                continue
            for held in node.datasets:
                if held.total > 0 and held.bytes > 0 and can_be_feature(held.dataset):
                    whole = min(1.0, held.bytes / held.total)
                    part = damped_share(self._shares.get(held.dataset, {}).get(node.name, 0.0), whole)
                    found.setdefault(held.dataset, {})[node.name] = part
        self._shares = dict(sorted(found.items(), key=_most_cached_first)[: self.max_datasets])

    def dataset_levels(self, inventory: Inventory) -> dict[str, HolderLevels]:
        """Return levels by dataset, over nodes that may get jobs."""
        usable = [node.name for node in inventory.nodes if node.usable]
        different = list({frozenset(nodes) for nodes in partitions_of(inventory).values()})
        partitions = different if len(different) <= _MAX_PARTITIONS else []
        found: dict[str, HolderLevels] = {}
        for dataset, parts in self._shares.items():
            here = {name: parts[name] for name in usable if name in parts}
            found[dataset] = divide_holders(here, partitions)
        return found


def _most_cached_first(item: tuple[str, Mapping[str, float]]) -> tuple[float, str]:
    """Return the sort key that puts datasets with more cached data first."""
    dataset, parts = item
    return -sum(part for part in parts.values() if part >= MIN_SHARE), dataset


def partitions_of(inventory: Inventory) -> dict[str, Collection[str]]:
    """Return the nodes of each partition that may get jobs; `-` is the default partition."""
    found: dict[str, set[str]] = {}
    for node in inventory.nodes:
        for partition in node.partitions if node.usable else ():
            found.setdefault(partition, set()).add(node.name)
            if partition == inventory.default:
                found.setdefault("-", set()).add(node.name)
    return dict(found)
