"""What is evicted, or pinned, on nodes as datasets' policies say, when no job reads it."""

import logging
from dataclasses import replace
from typing import Final

from cachefs.observe_messages import Order, OrderKind
from cachefs.planning.scheduling.cleaning import expired
from cachefs_scheduler.duties.book import Book
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.duties.warming import Warmings
from cachefs_scheduler.view.cluster_view import ClusterView

log = logging.getLogger(__name__)

# Pairs of a node and a snapshot whose last reads are remembered.
MOST_READS: Final = 200_000
# Seconds before the same is ordered of a node once more.
AGAIN: Final = 60.0


class Cleaning:
    """Used on the event loop."""

    def __init__(self, view: ClusterView, book: Book, policies: Policies, warmings: Warmings) -> None:
        self._view = view
        self._book = book
        self._policies = policies
        self._warmings = warmings
        # By node and snapshot: monotonic seconds when a job was seen to read it there last, or it was first seen.
        self.last_read: dict[tuple[str, str], float] = {}
        self._ordered: dict[tuple[str, str, str], float] = {}

    def step(self) -> None:
        """To be called every few seconds."""
        now = self._view.now()
        self._ordered = {key: when for key, when in self._ordered.items() if now - when < AGAIN}
        self._note_reads(now)
        current = self._view.datasets.current()
        rules = {snapshot: self._policies.rule(name) for name, snapshot in current.items()}
        names = {snapshot: name for name, snapshot in current.items()}
        wanted = {snapshot: rule for snapshot, rule in rules.items() if rule.kind in ("ttl", "pin")}
        if not wanted:
            return
        nodes = []
        for name in self._view.cluster:
            facts = self._view.cluster.facts(name)
            if facts is None or not wanted.keys() & facts.copies.keys():
                continue
            copies = {
                snapshot: replace(copy, idle=now - self.last_read.get((name, snapshot), now))
                for snapshot, copy in facts.copies.items()
            }
            nodes.append(replace(facts, copies=copies))
            for snapshot, rule in wanted.items():
                if rule.kind == "pin" and snapshot in copies and not copies[snapshot].pinned:
                    self._order(name, OrderKind.PIN, names[snapshot], now)
        for eviction in expired(nodes, wanted):
            if self._order(eviction.node, OrderKind.EVICT, names[eviction.snapshot], now):
                log.info("%s lets go %s: %s", eviction.node, names[eviction.snapshot], eviction.why)

    def _order(self, node: str, kind: OrderKind, dataset: str, now: float) -> bool:
        key = node, kind.value, dataset
        if key in self._ordered:
            return False
        self._ordered[key] = now
        self._warmings.tell(node, Order(kind=kind, dataset=dataset))
        return True

    def _note_reads(self, now: float) -> None:
        placed = {(node, one.snapshot) for one in self._book for node in one.nodes}
        seen: dict[tuple[str, str], float] = {}
        for state in self._view:
            running = {job.snapshot for job in state.report.jobs} if state.report is not None else set()
            for snapshot, report in state.snapshots.items():
                key = state.name, snapshot
                if not (report.memory or report.ssd) or len(seen) >= MOST_READS:
                    continue
                reads = snapshot in running or key in placed
                seen[key] = now if reads else self.last_read.get(key, now)
        self.last_read = seen
