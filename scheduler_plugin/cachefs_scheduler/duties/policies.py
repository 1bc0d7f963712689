"""Policies of datasets: the configuration, overridden by changes that administrators have made since."""

from collections.abc import Mapping
from typing import Final, get_args

import msgspec

from cachefs.errors import ConfigError, StoreFull
from cachefs.planning.scheduling.cleaning import CleaningRule
from cachefs.scheduling_messages import DatasetPolicy
from cachefs_scheduler.config import Cleanup, DatasetSection, SchedulerConfig

# Number of datasets whose policy administrators have changed.
MAX_OVERRIDES: int = 10_000
# Kinds of rules, from the most to the least protective.
_PROTECTION_ORDER: Final = ("pin", "keep", "lru", "ttl")


class Policies:
    """Looks up and changes dataset policies. Used on the event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._overrides: dict[str, DatasetPolicy] = {}

    def effective_policy(self, dataset: str) -> DatasetSection:
        """Return the policy that applies to a dataset."""
        section, said = self._config.dataset_section(dataset), self._overrides.get(dataset)
        if said is None:
            return section
        fields = {name: value for name, value in msgspec.structs.asdict(said).items() if value is not None}
        fields.pop("dataset")
        return section.model_copy(update=fields)

    def policy_message(self, dataset: str) -> DatasetPolicy:
        """Return the policy as a message."""
        section = self.effective_policy(dataset)
        return DatasetPolicy(
            dataset=dataset,
            max_jobs_per_copy=section.max_jobs_per_copy,
            max_copies=section.max_copies,
            cleanup=section.cleanup,
            ttl=section.ttl,
            preload=section.preload,
            release=section.release,
        )

    def apply_change(self, request: DatasetPolicy) -> None:
        """Apply an administrator's change. Raises ConfigError, StoreFull."""
        if request.cleanup is not None and request.cleanup not in get_args(Cleanup):
            raise ConfigError(f"cleanup {request.cleanup[:40]!r}: expected one of {', '.join(get_args(Cleanup))}")
        if "@" in request.dataset:
            raise ConfigError(f"{request.dataset!r}: a policy holds for all snapshots; leave out what follows the @")
        if request.dataset not in self._overrides and len(self._overrides) >= MAX_OVERRIDES:
            raise StoreFull(f"{MAX_OVERRIDES:,} datasets have a policy of their own; write them into the configuration")
        before = self._overrides.get(request.dataset, DatasetPolicy(dataset=request.dataset))
        given = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
        self._overrides[request.dataset] = msgspec.structs.replace(before, **given)

    def cleanup_rule(self, dataset: str) -> CleaningRule:
        """Return the clean-up rule of a dataset."""
        section = self.effective_policy(dataset)
        kind = "keep" if section.cleanup == "none" else section.cleanup
        return CleaningRule(kind, section.ttl if kind == "ttl" else 0.0)

    def cleanup_rules(self, current: Mapping[str, str]) -> dict[str, CleaningRule]:
        """Return rules by snapshot id. current: snapshot by dataset. Of several datasets with the same snapshot, the
        most protective rule applies."""
        found: dict[str, CleaningRule] = {}
        for dataset, snapshot in current.items():
            rule, known = self.cleanup_rule(dataset), found.get(snapshot)
            if known is None or _PROTECTION_ORDER.index(rule.kind) < _PROTECTION_ORDER.index(known.kind):
                found[snapshot] = rule
        return found

    @property
    def overrides(self) -> list[DatasetPolicy]:
        """Changes made by administrators, which must survive a restart."""
        return list(self._overrides.values())

    def restore(self, overrides: list[DatasetPolicy]) -> None:
        """Restore changes from before a restart."""
        self._overrides = {one.dataset: one for one in overrides[:MAX_OVERRIDES]}
