"""Counts the bytes of each snapshot on this node, by tier and shard, while a client asks.

The store notes which blocks change, and these changes are counted once in a while: so a report costs only the changes,
and no walk over all blocks. Only the first count walks through the index, 1 us per block. Without clients, nothing is
noted or kept. Clients are schedulers, and users who look at the node's page.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Final

import numpy as np

from cachefs.planning.blocks.presence import Presence, ShardBytes, state_in_tier
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.sequences.plan import Plan
from cachefs.snapshot import Snapshot
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.index_writer import IndexWriter

log = logging.getLogger(__name__)

# Most blocks of all snapshots that are followed at once; each takes 37 bytes, and nothing more where a job reads it
# here.
MAX_BLOCKS: Final = 1 << 23
# Keys that are processed together, while other threads wait for the interpreter: 5 ms.
_PORTION: Final = 1 << 14


class Residency:
    """Counts for several clients, each with its own snapshots and its own thread. Blocking."""

    def __init__(self, index: IndexWriter, tiering: Locked[Tiering], presence: Presence, plan: Plan) -> None:
        self._index = index
        self._tiering = tiering
        self._presence = presence
        self._plan = plan
        self._followed: dict[str, ShardBytes] = {}  # by snapshot id
        self._absent: set[str] = set()  # ids of snapshots with no block here, and none since
        self._too_large: set[str] = set()  # ids of snapshots that are not followed
        self._lock = threading.Lock()
        self._wanted: dict[str, dict[str, Snapshot]] = {}  # by client, then by snapshot id
        self._changed: dict[str, set[str]] = {}  # by client: the changed snapshots since its last call

    def count_changes(self, client: str, snapshots: Mapping[str, Snapshot]) -> set[str]:
        """Count the changes since the last call. client: the client; snapshots: by id, the most important first.
        Return the ids of those that have changed since the client's last call, or are new, or no longer wanted."""
        with self._lock:
            self._wanted[client] = dict(snapshots)
            different = self._update_counts({name: one for each in self._wanted.values() for name, one in each.items()})
            for other in self._wanted:
                self._changed[other] = self._changed.get(other, set()) | different
            return self._changed.pop(client)

    def _update_counts(self, snapshots: Mapping[str, Snapshot]) -> set[str]:
        changes, brought = self._take_changes()
        different = {one for one in self._followed if one not in snapshots}
        for one in different:
            del self._followed[one]
        self._absent &= snapshots.keys()
        self._too_large &= snapshots.keys()
        if changes is None:  # nothing was noted: it is the first time, or too much has changed
            different |= self._followed.keys()
            self._followed.clear()
            self._absent.clear()
        elif changes:
            keys, states = list(changes), np.fromiter(changes.values(), np.uint8, len(changes))
            different |= {one for one, counted in self._followed.items() if counted.apply_changes(keys, states)}
        self._absent -= brought
        new = [snapshot for snapshot in snapshots if snapshot not in self._followed and snapshot not in self._absent]
        return different | self._start_counting({one: snapshots[one] for one in new})

    def counts_of(self, snapshot: str) -> ShardBytes | None:
        """Return the counts of a snapshot; None where nothing is here, or it is not followed. During a change for
        another client the numbers may be intermediate; the next call of `count_changes` then returns the snapshot
        again."""
        return self._followed.get(snapshot)

    def is_too_large(self, snapshot: str) -> bool:
        """Return whether the snapshot was requested but has too many files to be followed."""
        return snapshot in self._too_large

    def forget(self, client: str) -> None:
        """Stop following the client's snapshots."""
        with self._lock:
            self._wanted.pop(client, None)
            self._changed.pop(client, None)
            if self._wanted:
                return
            with self._tiering:
                self._presence.stop_noting()
            self._followed.clear()
            self._absent.clear()

    def _take_changes(self) -> tuple[dict[bytes, int] | None, set[str]]:
        """Return the changes since the last call, and the snapshots for which blocks came."""
        with self._tiering as tiering:
            changes = self._presence.take_changes()
            brought, tiering.quotas.fetched_snapshots = tiering.quotas.fetched_snapshots, set()
        return changes, brought

    def _start_counting(self, snapshots: Mapping[str, Snapshot]) -> set[str]:
        """Walk through the index for these snapshots. Changes meanwhile are noted, and counted the next time."""
        begun: dict[str, ShardBytes] = {}
        room = MAX_BLOCKS - sum(one.space.count for one in self._followed.values())
        for name, snapshot in snapshots.items():
            space = self._plan.spaces.get(name)
            if space is None and snapshot.files > room:
                self._mark_too_large(name, snapshot)
                continue
            counted = begun[name] = ShardBytes(space or BlockSpace.of(snapshot))
            room -= counted.space.count
        if begun:
            self._count_index(begun)
        found = {name for name, counted in begun.items() if not counted.is_empty}
        self._followed |= {name: begun[name] for name in found}
        self._absent |= begun.keys() - found
        return found

    def _count_index(self, begun: Mapping[str, ShardBytes]) -> None:
        self._index.commit()
        for keys, tiers in self._index.keys_with_tiers(_PORTION):
            states = np.frombuffer(tiers, np.uint8) + np.uint8(state_in_tier(0))
            for counted in begun.values():
                counted.apply_changes(keys, states)

    def _mark_too_large(self, name: str, snapshot: Snapshot) -> None:
        if name not in self._too_large:
            self._too_large.add(name)
            log.warning(
                "snapshot %s has %d files, too many to count its blocks by shard: at most %d blocks of all snapshots "
                "are followed", name, snapshot.files, MAX_BLOCKS,
            )  # fmt: skip
