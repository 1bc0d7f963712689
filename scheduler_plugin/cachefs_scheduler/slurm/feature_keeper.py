"""Keeps node features and the hint file current, by comparing Slurm with the service periodically.

`CachedShares` tracks which part of each dataset each Slurm node holds, from the service's answers. Features set with
scontrol are lost by `scontrol reconfigure` and by a restart of slurmctld, without notice, so each pass compares the
nodes' features with the wanted ones.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import NodesStatus
from cachefs_scheduler.slurm.config import SlurmHintConfig
from cachefs_scheduler.slurm.hint_file import (
    MIN_SHARE,
    HintHeading,
    HintStamp,
    HolderLevels,
    damped_share,
    divide_holders,
    hints_text,
    write_hints,
)
from cachefs_scheduler.slurm.node_records import Inventory, can_be_feature, feature_changes, feature_name
from cachefs_scheduler.slurm.problem_log import ProblemLog
from cachefs_scheduler.slurm.service_client import ServiceClient
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

# Beyond this number, partitions are ignored: thousands of partitions have few distinct node sets.
_MAX_PARTITIONS: Final = 64
# Seconds for which a node's last known contents are kept while the service has not heard it: a restarted service needs
# some seconds to hear all nodes, and without this all features would disappear and return.
_KEPT_SECONDS: Final = 120.0
_log = logging.getLogger(__name__)
_CONFIG_SECONDS: Final = 60.0  # seconds between reads of slurm.conf
# Slurm replaces all features of a node at once, so a change by an administrator between our read and our call is lost.
# Calls follow within this many seconds after a read, else the nodes are read again.
_CALL_SECONDS: Final = 0.5
# Features of ours per node, for the datasets with the most cached data. Tested with 500; an argument of a command is
# limited to 128 KiB.
_MAX_FEATURES: Final = 400


@dataclass
class CachedShares:
    """The cached part of each dataset by node, as of the service's last answer."""

    max_datasets: int  # number of datasets
    max_age: float  # seconds for which a node's last report counts
    _shares: dict[str, dict[str, float]] = field(default_factory=dict)  # by dataset and node
    _reported_at: dict[str, float] = field(default_factory=dict)  # by node: when the service last reported its contents

    def record_status(self, status: NodesStatus, now: float) -> None:
        """Record an answer of the service. now: monotonic seconds."""
        reported = {node.name for node in status.nodes if node.age >= 0}
        self._reported_at.update(dict.fromkeys(reported, now))
        self._reported_at = {
            name: at for name, at in self._reported_at.items() if now - at <= min(_KEPT_SECONDS, self.max_age)
        }
        unheard = self._reported_at.keys() - reported
        found = {
            dataset: kept
            for dataset, parts in self._shares.items()
            if (kept := {node: part for node, part in parts.items() if node in unheard})
        }
        for node in status.nodes:
            if node.age > self.max_age or node.state in ("away", "draining"):
                continue
            for cached in node.datasets:
                if cached.total > 0 and cached.bytes > 0 and can_be_feature(cached.dataset):
                    share = min(1.0, cached.bytes / cached.total)
                    part = damped_share(self._shares.get(cached.dataset, {}).get(node.name, 0.0), share)
                    found.setdefault(cached.dataset, {})[node.name] = part
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


class FeatureKeeper:
    """Updates features and hint file, once per pass."""

    def __init__(self, config: SlurmHintConfig, service: ServiceClient, slurm: SlurmCommands) -> None:
        self._config, self._service, self._slurm = config, service, slurm
        self._parts = CachedShares(config.slurm.datasets, config.slurm.oldest)
        self._has_response = False  # whether the service has ever answered
        self._can_prefer = False
        self._next_config_check = 0.0
        self._problems = ProblemLog(_log)

    async def run_pass(self, now: Callable[[], float]) -> bool:
        """Run one pass. Returns whether the next one is due soon. now: a monotonic clock, in seconds."""
        stamp = HintStamp.current()
        fresh = await self._query_service(now)
        if not self._has_response:
            return False  # until the service answers, keep what an earlier run has set
        try:
            inventory = await self._slurm.list_nodes()
            if now() >= self._next_config_check:
                await self._check_slurm_conf()
                self._next_config_check = now() + _CONFIG_SECONDS
            levels = self._parts.dataset_levels(inventory)
            left = await self._set_features(inventory, levels, now)
        except CachefsError as error:
            self._problems.report_problem("slurm", "features of nodes stay as they are: %s", error)
            return False
        self._problems.report_solved("slurm")
        if fresh:
            # Only after a fresh answer: Lua judges the answer's age by the stamp.
            await self._write_hints(self._hints_text(stamp, inventory, levels))
        return left

    async def remove_features(self) -> int:
        """Remove all cachefs features. Returns the number of nodes changed. Raises CachefsError."""
        found = feature_changes((await self._slurm.list_nodes()).nodes, {})
        for change in found:
            await self._slurm.set_features(change)
        return sum(len(change.nodes) for change in found)

    async def _query_service(self, now: Callable[[], float]) -> bool:
        try:
            self._parts.record_status(await self._service.fetch_nodes(), now())
        except CachefsError as error:
            self._problems.report_problem("service", "%s; hints end in %d s", error, self._config.slurm.hints_last)
            return False
        self._problems.report_solved("service")
        self._has_response = True
        return True

    async def _write_hints(self, text: str) -> None:
        file = self._config.slurm.hint_file
        try:
            await asyncio.to_thread(write_hints, file, text)
        except OSError as error:
            self._problems.report_problem("hint file", "%s: %s; Lua will soon ignore it", file, error.strerror or error)
        else:
            self._problems.report_solved("hint file")

    async def _check_slurm_conf(self) -> None:
        self._can_prefer = await self._slurm.can_prefer_any_feature()
        if not self._can_prefer:
            self._problems.report_problem(
                "slurm.conf",
                "jobs get no preferred features, as Slurm would refuse some jobs; put ignore_prefer_validation into "
                "SchedulerParameters of slurm.conf, then run: scontrol reconfigure",
            )
        else:
            self._problems.report_solved("slurm.conf")

    async def _set_features(
        self, inventory: Inventory, levels: Mapping[str, HolderLevels], now: Callable[[], float]
    ) -> bool:
        """Apply changes of features. Returns whether changes are left."""
        wanted: dict[str, set[str]] = {}
        for dataset, each in levels.items():
            for node in each.nested.get("some", ()):
                ours = wanted.setdefault(node, set())
                names = {feature_name(dataset, level) for level in each.levels_of_node(node)}
                if len(ours) + len(names) <= _MAX_FEATURES:
                    ours |= names
        due = feature_changes(inventory.nodes, wanted)
        begun = now()
        for done, change in enumerate(due):
            if now() - begun > _CALL_SECONDS:
                _log.info("%d of %d changes of node features are left for the next pass", len(due) - done, len(due))
                return True
            try:
                await self._slurm.set_features(change)
            except CachefsError as error:
                # A node that went away must not block the others.
                self._problems.report_problem("features", "%s", error)
        return False

    def _hints_text(self, stamp: HintStamp, inventory: Inventory, levels: Mapping[str, HolderLevels]) -> str:
        slurm = self._config.slurm
        cpus = max((node.cpus for node in inventory.nodes), default=0)
        heading = HintHeading(stamp, slurm.hints_last, self._can_prefer, slurm.wait, slurm.wait_for, cpus)
        nested = {dataset: each for dataset, each in levels.items() if each.nested}
        return hints_text(heading, nested, partitions_of(inventory))
