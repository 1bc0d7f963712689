"""Keeps node features and the hint file current, by comparing Slurm with the service periodically.

Features set with scontrol are lost by `scontrol reconfigure` and by a restart of slurmctld, without notice, so each
pass compares the nodes' features with the wanted ones.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm.cached_parts import CachedParts, partitions_of
from cachefs_scheduler.slurm.config import HintConfig
from cachefs_scheduler.slurm.feature_names import feature
from cachefs_scheduler.slurm.few_lines import FewLines
from cachefs_scheduler.slurm.hint_file import Heading, Stamp, text_of, write
from cachefs_scheduler.slurm.levels import Levels
from cachefs_scheduler.slurm.node_records import Inventory, changes
from cachefs_scheduler.slurm.service_client import ServiceClient
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

_log = logging.getLogger(__name__)
_CONFIG_EVERY: Final = 60.0  # seconds between reads of slurm.conf
# Slurm replaces all features of a node at once, so a change by an administrator between our read and our call is lost.
# Calls follow within this many seconds after a read, else the nodes are read again.
_WITHIN: Final = 0.5
# Features of ours per node, for the datasets with the most cached data. Tested with 500; an argument of a command is
# limited to 128 KiB.
_MOST_FEATURES: Final = 400


class FeatureKeeper:
    """Updates features and hint file, once per pass."""

    def __init__(self, config: HintConfig, service: ServiceClient, slurm: SlurmCommands) -> None:
        self._config, self._service, self._slurm = config, service, slurm
        self._parts = CachedParts(config.slurm.datasets, config.slurm.oldest)
        self._knows = False  # whether the service has ever answered
        self._steer = False
        self._look_at_config = 0.0
        self._problems = FewLines(_log)

    async def look(self, now: Callable[[], float]) -> bool:
        """Run one pass. Returns whether the next one is due soon. now: a monotonic clock, in seconds."""
        stamp = Stamp.now()
        fresh = await self._ask_service(now)
        if not self._knows:
            return False  # until the service answers, keep what an earlier run has set
        try:
            inventory = await self._slurm.inventory()
            if now() >= self._look_at_config:
                await self._look_at_slurm_conf()
                self._look_at_config = now() + _CONFIG_EVERY
            levels = self._parts.levels(inventory)
            left = await self._set_features(inventory, levels, now)
        except CachefsError as error:
            self._problems.error("slurm", "features of nodes stay as they are: %s", error)
            return False
        self._problems.good("slurm")
        if fresh:
            # Only after a fresh answer: Lua judges the answer's age by the stamp.
            await self._write(self._text(stamp, inventory, levels))
        return left

    async def remove(self) -> int:
        """Remove all cachefs features. Returns the number of nodes changed. Raises CachefsError."""
        found = changes((await self._slurm.inventory()).nodes, {})
        for change in found:
            await self._slurm.set_features(change)
        return sum(len(change.nodes) for change in found)

    async def _ask_service(self, now: Callable[[], float]) -> bool:
        try:
            self._parts.learn(await self._service.nodes(), now())
        except CachefsError as error:
            self._problems.error("service", "%s; hints end in %d s", error, self._config.slurm.hints_last)
            return False
        self._problems.good("service")
        self._knows = True
        return True

    async def _write(self, text: str) -> None:
        file = self._config.slurm.hint_file
        try:
            await asyncio.to_thread(write, file, text)
        except OSError as error:
            self._problems.error("hint file", "%s: %s; Lua will soon ignore it", file, error.strerror or error)
        else:
            self._problems.good("hint file")

    async def _look_at_slurm_conf(self) -> None:
        self._steer = await self._slurm.takes_any_preference()
        if not self._steer:
            self._problems.error(
                "slurm.conf",
                "nothing is preferred for jobs, since Slurm would refuse some; put ignore_prefer_validation into "
                "SchedulerParameters of slurm.conf, then run: scontrol reconfigure",
            )
        else:
            self._problems.good("slurm.conf")

    async def _set_features(self, inventory: Inventory, levels: Mapping[str, Levels], now: Callable[[], float]) -> bool:
        """Apply changes of features. Returns whether changes are left."""
        wanted: dict[str, set[str]] = {}
        for dataset, each in levels.items():
            for node in each.nested.get("some", ()):
                ours = wanted.setdefault(node, set())
                names = {feature(dataset, level) for level in each.of(node)}
                if len(ours) + len(names) <= _MOST_FEATURES:
                    ours |= names
        due = changes(inventory.nodes, wanted)
        begun = now()
        for done, change in enumerate(due):
            if now() - begun > _WITHIN:
                _log.info("%d of %d changes of node features are left for the next look", len(due) - done, len(due))
                return True
            try:
                await self._slurm.set_features(change)
            except CachefsError as error:
                # A node that went away must not block the others.
                self._problems.error("features", "%s", error)
        return False

    def _text(self, stamp: Stamp, inventory: Inventory, levels: Mapping[str, Levels]) -> str:
        slurm = self._config.slurm
        cpus = max((node.cpus for node in inventory.nodes), default=0)
        heading = Heading(stamp, slurm.hints_last, self._steer, slurm.wait, slurm.wait_for, cpus)
        held = {dataset: each for dataset, each in levels.items() if each.nested}
        return text_of(heading, held, partitions_of(inventory))
