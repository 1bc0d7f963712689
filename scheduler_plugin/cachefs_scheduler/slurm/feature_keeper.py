"""Keeps node features and the hint file current, by comparing Slurm with the service periodically.

Features set with scontrol are lost by `scontrol reconfigure` and by a restart of slurmctld, without notice, so each
pass compares the nodes' features with the wanted ones.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm.cached_shares import CachedShares, partitions_of
from cachefs_scheduler.slurm.config import SlurmHintConfig
from cachefs_scheduler.slurm.feature_names import feature_name
from cachefs_scheduler.slurm.hint_file import HintHeading, HintStamp, hints_text, write_hints
from cachefs_scheduler.slurm.levels import HolderLevels
from cachefs_scheduler.slurm.node_records import Inventory, feature_changes
from cachefs_scheduler.slurm.problem_log import ProblemLog
from cachefs_scheduler.slurm.service_client import ServiceClient
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

_log = logging.getLogger(__name__)
_CONFIG_SECONDS: Final = 60.0  # seconds between reads of slurm.conf
# Slurm replaces all features of a node at once, so a change by an administrator between our read and our call is lost.
# Calls follow within this many seconds after a read, else the nodes are read again.
_CALL_SECONDS: Final = 0.5
# Features of ours per node, for the datasets with the most cached data. Tested with 500; an argument of a command is
# limited to 128 KiB.
_MAX_FEATURES: Final = 400


class FeatureKeeper:
    """Updates features and hint file, once per pass."""

    def __init__(self, config: SlurmHintConfig, service: ServiceClient, slurm: SlurmCommands) -> None:
        self._config, self._service, self._slurm = config, service, slurm
        self._parts = CachedShares(config.slurm.datasets, config.slurm.oldest)
        self._has_answer = False  # whether the service has ever answered
        self._can_prefer = False
        self._next_config_check = 0.0
        self._problems = ProblemLog(_log)

    async def run_pass(self, now: Callable[[], float]) -> bool:
        """Run one pass. Returns whether the next one is due soon. now: a monotonic clock, in seconds."""
        stamp = HintStamp.current()
        fresh = await self._ask_service(now)
        if not self._has_answer:
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

    async def _ask_service(self, now: Callable[[], float]) -> bool:
        try:
            self._parts.record_status(await self._service.fetch_nodes(), now())
        except CachefsError as error:
            self._problems.report_problem("service", "%s; hints end in %d s", error, self._config.slurm.hints_last)
            return False
        self._problems.report_solved("service")
        self._has_answer = True
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
        held = {dataset: each for dataset, each in levels.items() if each.nested}
        return hints_text(heading, held, partitions_of(inventory))
