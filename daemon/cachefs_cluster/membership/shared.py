"""Membership by a store that all nodes share, such as etcd."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.formatting import format_names
from cachefs_cluster.membership import last_known
from cachefs_cluster.membership.last_known import LastKnownCluster
from cachefs_cluster.membership.membership import Listener
from cachefs_cluster.membership.ring import Ring, RingPlanner
from cachefs_cluster.membership.store import RECORD_SECONDS, RecordStore, StoreContent
from cachefs_cluster.membership.view import ClusterView, NodeRecord, State
from cachefs_daemon.runtime.autosave import autosave

log = logging.getLogger(__name__)

# Seconds that a start waits for the store. Without it the node begins alone.
_START_SECONDS: Final = 3.0
# Further seconds that a start waits for the record of an earlier daemon with its id to vanish.
_VANISH_SECONDS: Final = RECORD_SECONDS + 5.0
# Seconds from the first reason to change the ring to the change, so that nodes that start together make one change.
_SETTLE_SECONDS: Final = 0.5
# Seconds after which the node of the next rank makes the change that the one before has not made.
_RANK_SECONDS: Final = 2.0
_REFRESH_SECONDS: Final = 1.0
# Least seconds between two updates of the view: one takes 12 ms with 1,000 nodes, which may all start at the same time.
_GATHER_SECONDS: Final = 0.1
# Most nodes of another cluster that a message names.
_MAX_SHOWN: Final = 5


class SharedMembership:
    """The nodes that have records in a store. Used on the event loop, but for `view`."""

    def __init__(
        self, store: RecordStore, record: NodeRecord, grace: float, state_dir: Path, vanishing: float = _VANISH_SECONDS
    ) -> None:
        """record: of this node. state_dir: directory for the last known state. vanishing: seconds that a start waits
        for the record of an earlier daemon of this node to vanish."""
        self._store = store
        self._record = record
        self._state_dir = state_dir
        self._vanishing = vanishing
        self._planner = RingPlanner(record.id, grace)
        self._listeners: list[Listener] = []
        self._problem = ""
        self._latest_content: StoreContent | None = None  # not taken in yet
        self._updated_at = float("-inf")  # monotonic time of the last update
        self._version: object = 0
        self._is_read = False  # has the store been read since this start?
        self._has_ring = False  # has the store a ring?
        # Monotonic time since when the ring differs from the wanted one; None if it does not.
        self._ring_differs_since: float | None = None
        self._foreign_problem = ""  # the problem of nodes of another cluster in the same place of the store, or ""
        # Names of these clusters, and whether this node was shut out, when that was last logged.
        self._logged_foreign: tuple[frozenset[str], bool] = (frozenset(), False)
        self._is_ring_foreign = False  # does one of them have the ring?
        self._rival: NodeRecord | None = None  # another running node with this one's id
        self._read_event = asyncio.Event()  # the store has been read, or does not answer
        self._record_seen = asyncio.Event()  # the store has a record with this node's id, or does not answer
        self._claimed_event = asyncio.Event()
        self._fresh_event = asyncio.Event()
        self._changed_event = asyncio.Event()
        self._refreshed_at = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self._saved: LastKnownCluster | None = None
        self._planner.update({record.id: record}, None, time.monotonic())
        self.view = self._planner.make_view(store.source, "")

    # --- used by other modules of the node ---------------------------------------------------------------------------

    def add_listener(self, callback: Listener) -> None:
        self._listeners.append(callback)

    async def start(self) -> None:
        self._store.set_record(self._record)
        self._store.start(self)
        saving = autosave(self._save, "the daemon starts without known members")
        self._tasks = [asyncio.create_task(work) for work in (self._keep_ring(), saving)]
        async with asyncio.TaskGroup() as group:
            group.create_task(_wait_for(self._read_event, _START_SECONDS))
            group.create_task(_wait_for(self._record_seen, _START_SECONDS))
        if not self._is_read:
            self._restore_last_known()
        if (other := self._rival) is None:
            return
        log.info("a record of %s at %s has this node's id; waiting until it vanishes", other.name, other.address)
        if not await _wait_for(self._claimed_event, self._vanishing):
            await self.stop()
            raise ConfigError(self._id_taken_text(other))

    async def announce(self, state: State) -> None:
        self._record = dataclasses.replace(self._record, state=state)
        self._store.set_record(self._record)
        self._planner.update({**self._planner.records, self._record.id: self._record}, None, time.monotonic())
        self._update_view()

    async def refresh(self) -> None:
        now = time.monotonic()
        if self._stopped or now - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = now
        self._fresh_event.clear()
        self._store.refresh()
        await _wait_for(self._fresh_event, _REFRESH_SECONDS)

    def note_response(self, node_id: str, incarnation: str = "") -> None:
        """Take a peer's new incarnation while the store does not answer. Otherwise the store knows which nodes are
        up."""
        record = self._planner.records.get(node_id)
        is_new = record is not None and incarnation not in ("", record.incarnation) and node_id != self._record.id
        if record is not None and is_new and self._problem:
            again = dataclasses.replace(record, incarnation=incarnation)
            self._planner.update({**self._planner.records, node_id: again}, None, time.monotonic())
            self._update_view()

    def note_silence(self, node_id: str) -> None:
        """Do nothing: the store knows which nodes are up."""

    def note_record(self, record: NodeRecord) -> None:
        """Do nothing: the store has all records."""

    async def leave(self) -> None:
        await self.stop()
        self._latest_content, self._problem, self._rival = None, "", None
        # Without other nodes in the view, none is followed, asked or waited for: they would refuse this one.
        self._planner.update({self._record.id: self._record}, Ring(self._planner.ring.epoch), time.monotonic())
        self._update_view()

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            await self._store.stop()

    # --- reports of the store ----------------------------------------------------------------------------------------

    def on_content(self, content: StoreContent) -> None:
        """Receive the content of the store."""
        if self._latest_content is None and not self._stopped:
            pause = max(0.0, self._updated_at + _GATHER_SECONDS - time.monotonic())
            asyncio.get_running_loop().call_later(pause, self._apply_content)
        self._latest_content = content

    def _apply_content(self) -> None:
        """Update the view from the last content; earlier ones are skipped."""
        stored, self._latest_content, self._updated_at = self._latest_content, None, time.monotonic()
        if stored is None or self._stopped:
            return
        self._is_read = True
        known = {each: record for each, record in stored.records.items() if self._is_ours(record)}
        ring = self._own_ring(stored, known)
        self._version, self._has_ring = stored.version, ring is not None
        self._planner.update({**known, self._record.id: self._record}, ring, time.monotonic())
        self._read_event.set()
        self._fresh_event.set()
        self._update_view()

    def _is_ours(self, record: NodeRecord) -> bool:
        """Return whether a record is of this node's cluster. Nodes of the last release do not name it, and count."""
        return not (record.cluster and self._record.cluster) or record.cluster == self._record.cluster

    def _own_ring(self, stored: StoreContent, known: Mapping[str, NodeRecord]) -> Ring | None:
        """Return the ring without nodes of other clusters; None without a ring, or if it is another cluster's: that of
        the cluster with the most nodes in it. Other clusters leave it alone, else they would replace each other's ring
        endlessly."""
        strangers = {each: record for each, record in stored.records.items() if each not in known}
        ring = stored.ring
        self._is_ring_foreign = ring is not None and self._is_of_others(ring, stored)
        problem = self._foreign_nodes_text(list(strangers.values()))
        clusters = frozenset(record.cluster for record in strangers.values())
        if problem and (clusters, self._is_ring_foreign) != self._logged_foreign:
            log.warning("%s", problem)
        self._foreign_problem, self._logged_foreign = problem, (clusters, self._is_ring_foreign)
        if ring is None or self._is_ring_foreign:
            return None
        return Ring(ring.epoch, tuple(node for node in ring.nodes if node.id not in strangers))

    def _is_of_others(self, ring: Ring, stored: StoreContent) -> bool:
        records = (stored.records.get(node.id) for node in ring.nodes)
        counts = Counter(record.cluster for record in records if record is not None and record.cluster)
        owner = min(counts, key=lambda name: (-counts[name], name), default=self._record.cluster)
        return bool(self._record.cluster) and owner != self._record.cluster

    def _foreign_nodes_text(self, strangers: Sequence[NodeRecord]) -> str:
        if not strangers:
            return ""
        shown = format_names(sorted(record.name for record in strangers), _MAX_SHOWN)
        return (
            f"nodes of cluster {min(record.cluster for record in strangers)!r} ({shown}) have their records in the "
            f"same place of {self._store.source} as this one of cluster {self._record.cluster!r}; give each cluster a "
            "prefix, or a name, of its own" + "; until then this node shares nothing" * self._is_ring_foreign
        )

    def on_claimed(self) -> None:
        """Note that the store has this node's record."""
        self._claimed_event.set()
        self._record_seen.set()
        if self._rival is not None:
            self._rival = None
            log.info("no other node uses the id of this node any longer")
            self._update_view()

    def on_id_taken(self, record: NodeRecord) -> None:
        """Note that another running node has this node's id."""
        self._record_seen.set()
        if self._rival is None and self._claimed_event.is_set():
            log.warning("%s", self._id_taken_text(record))
        self._rival = record
        self._claimed_event.clear()
        self._update_view()

    def on_problem(self, text: str) -> None:
        """Note a problem with the store; "" if there is none any more."""
        if text == self._problem:
            return
        if not text:
            log.info("%s answers again", self._store.source)
        elif not self._problem:  # the reason may change with every attempt
            log.warning("%s; this node continues with the last known members", text)
        self._problem = text
        self._read_event.set()
        self._record_seen.set()
        self._update_view()

    def on_fresh(self) -> None:
        """Note that the view is up to date."""
        self._fresh_event.set()

    # --- last known state --------------------------------------------------------------------------------------------

    def _restore_last_known(self) -> None:
        """Begin with the state that an earlier daemon saved, until the store answers."""
        if (found := last_known.load_last_known(self._state_dir, self._record.id)) is not None:
            ring, records = found
            log.info("starting with the %d last known nodes", len(records))
            self._planner.update({**records, self._record.id: self._record}, ring, time.monotonic())
            self._update_view()

    async def _save(self) -> None:
        """Save the known state if it has changed. Raises OSError."""
        roster = self._planner
        known = LastKnownCluster(roster.me, roster.ring.epoch, roster.ring.nodes, tuple(roster.records.values()))
        if self._is_read and known != self._saved:
            await asyncio.get_running_loop().run_in_executor(None, last_known.save_last_known, self._state_dir, known)
            self._saved = known

    # --- the ring ----------------------------------------------------------------------------------------------------

    async def _keep_ring(self) -> None:
        """Change the ring, until the end, whenever it is not the wanted one and this node is the one to change it."""
        while True:
            pause = self._propose_if_due(time.monotonic())
            self._changed_event.clear()
            await _wait_for(self._changed_event, pause)

    def _propose_if_due(self, now: float) -> float:
        """Propose a ring if it is time for that. Return the seconds until it may be time."""
        nodes = self._planner.wanted_nodes(now)
        is_right = nodes == self._planner.ring.nodes and (self._has_ring or not nodes)
        if is_right or self._problem or self._is_ring_foreign or not self._claimed_event.is_set():
            self._ring_differs_since = None
            grace = self._planner.seconds_to_next_change(now)
            return 60.0 if grace is None else grace + 0.01
        if self._ring_differs_since is None:
            self._ring_differs_since = now
        due = self._ring_differs_since + _SETTLE_SECONDS + _RANK_SECONDS * self._planner.leader_rank()
        if now < due:
            return due - now
        self._ring_differs_since = now  # propose again if this fails
        self._store.propose(Ring(self._planner.ring.epoch + 1, nodes), self._version)
        return _SETTLE_SECONDS

    def _update_view(self) -> None:
        """Update the view, and call the listeners if it has changed."""
        problem = (
            self._id_taken_text(self._rival) if self._rival is not None else self._problem or self._foreign_problem
        )
        before, view = self.view, self._planner.make_view(self._store.source, problem)
        self._changed_event.set()
        if (before.epoch, before.members, before.ring, before.problem) == (
            view.epoch, view.members, view.ring, view.problem,
        ):  # fmt: skip
            return
        self.view = view
        if not self._stopped:
            _log_changes(before, view)
        for callback in self._listeners:
            try:
                callback(view)
            except Exception:  # a bug of one listener must not affect the others
                log.exception("internal error of a listener to changes of the cluster")

    def _id_taken_text(self, other: NodeRecord) -> str:
        return (
            f"the node {other.name} at {other.address} runs with the id of this one ({other.id}): was "
            f"{self._state_dir} copied? Remove {self._state_dir}/node here, and this node has a new id"
        )


def _log_changes(before: ClusterView, view: ClusterView) -> None:
    """Log which nodes come, go, and count for placement."""
    for record in view.others:
        known = before.get(record.id)
        if known is None or known.state != record.state:
            log.info("node %s at %s is %s", record.name, record.address, record.state)
        elif known.incarnation != record.incarnation and record.incarnation:
            log.info("node %s at %s has started again", record.name, record.address)
    for record in before.others:
        if view.get(record.id) is None:
            log.info("node %s at %s has left", record.name, record.address)
    if view.epoch != before.epoch:
        log.info("ring epoch %d: nodes that have blocks of their own: %d", view.epoch, len(view.ring))


async def _wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait for *event*. Return whether it is set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
