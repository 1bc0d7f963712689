"""Policies of datasets, and the evictions and pins that follow from them.

A policy comes from the configuration, overridden by changes that administrators have made since. `CopyCleaner` applies
the policies. Nodes of a cluster are homes of blocks that other nodes read, so the time-to-live counts from the last
read on any node, not on the node whose copy is evicted. A copy that arrived later stays on its node for one
time-to-live.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, get_args

import msgspec

from cachefs.errors import ConfigError, StoreFull
from cachefs.observe_messages import CommandKind, NodeCommand
from cachefs.planning.scheduling.copies import CleaningRule, expired_evictions
from cachefs.planning.scheduling.facts import NodeFacts
from cachefs.scheduling_messages import DatasetPolicy
from cachefs_scheduler.config import Cleanup, DatasetSection, SchedulerConfig
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.duties.snapshot_reads import SnapshotReads
from cachefs_scheduler.view.reported_cluster import ReportedCluster

# Number of datasets whose policy administrators have changed.
MAX_OVERRIDES: int = 10_000
# Kinds of rules, from the most to the least protective.
_PROTECTION_ORDER: Final = ("pin", "keep", "lru", "ttl")
log = logging.getLogger(__name__)

# Copies per step: 10 ms. With 5,000 nodes and 200 datasets, a pass over all copies takes ten minutes.
MAX_COPIES: Final = 4096
# Seconds before the same command is sent to a node again.
REPEAT_SECONDS: Final = 60.0


class Policies:
    """Looks up and changes dataset policies. Used on the event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._overrides: dict[str, DatasetPolicy] = {}

    def effective_policy(self, dataset: str) -> DatasetSection:
        """Return the policy that applies to a dataset."""
        section, override = self._config.dataset_section(dataset), self._overrides.get(dataset)
        if override is None:
            return section
        fields = {name: value for name, value in msgspec.structs.asdict(override).items() if value is not None}
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
        changes = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
        self._overrides[request.dataset] = msgspec.structs.replace(before, **changes)

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


class CopyCleaner:
    """Applies clean-up policies step by step. Used on the event loop."""

    def __init__(self, view: ReportedCluster, policies: Policies, warmups: NodeWarmups, reads: SnapshotReads) -> None:
        self._view = view
        self._policies = policies
        self._warmups = warmups
        self._reads = reads
        self._remaining_nodes: list[str] = []  # nodes that the current pass has not reached yet
        self._commanded: dict[tuple[str, str, str], float] = {}

    def clean_next(self) -> None:
        """Record what jobs read; if this replica may send commands, continue the pass over all nodes. Call every few
        seconds, on each replica."""
        now = self._view.advance_clock()
        self._commanded = {key: when for key, when in self._commanded.items() if now - when < REPEAT_SECONDS}
        current = self._view.datasets.current_snapshots()
        self._reads.note_job_reads(set(current.values()), now)
        rules = {one: rule for one, rule in self._policies.cleanup_rules(current).items() if rule.kind != "keep"}
        if not rules or not self._warmups.can_send:
            return
        names = {snapshot: name for name, snapshot in current.items()}
        used = self._reads.snapshots_in_use(rules, now)
        if not self._remaining_nodes:
            self._remaining_nodes = sorted(self._view.nodes)
        looked = 0
        while self._remaining_nodes and looked < MAX_COPIES:
            name = self._remaining_nodes.pop()
            facts = self._view.cluster.current_facts(name)
            if facts is None:
                continue
            looked += 1 + len(facts.copies)
            copies = {
                one: replace(copy, idle=now - self._reads.last_use(name, one, now))
                for one, copy in facts.copies.items()
                if one in rules and (rules[one].kind == "pin" or one not in used)
            }
            self._clean_node(replace(facts, copies=copies), rules, names, now)

    def _clean_node(
        self, node: NodeFacts, rules: Mapping[str, CleaningRule], names: Mapping[str, str], now: float
    ) -> None:
        for snapshot, copy in node.copies.items():
            if rules[snapshot].kind == "pin" and not copy.pinned:
                self._send_once(node.name, CommandKind.PIN, names[snapshot], now)
        for eviction in expired_evictions([node], rules):
            if self._send_once(eviction.node, CommandKind.EVICT, names[eviction.snapshot], now):
                log.info("%s: evicting %s: %s", eviction.node, names[eviction.snapshot], eviction.reason)

    def _send_once(self, node: str, kind: CommandKind, dataset: str, now: float) -> bool:
        key = node, kind.value, dataset
        if key in self._commanded or not self._warmups.send_command(node, NodeCommand(kind=kind, dataset=dataset)):
            return False
        self._commanded[key] = now
        return True
