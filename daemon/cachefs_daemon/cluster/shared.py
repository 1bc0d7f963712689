"""Membership by a store that all nodes share, such as etcd."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cachefs.counts import shown_names
from cachefs.errors import ConfigError
from cachefs_daemon.cluster import last_known
from cachefs_daemon.cluster.last_known import LastKnown
from cachefs_daemon.cluster.membership import Listener
from cachefs_daemon.cluster.ring import Ring, Roster
from cachefs_daemon.cluster.store import RECORD_SECONDS, RecordStore, Stored
from cachefs_daemon.cluster.view import ClusterView, NodeRecord, State
from cachefs_daemon.runtime.autosave import autosave

log = logging.getLogger(__name__)

# Seconds that a start waits for the store. Without it the node begins alone.
_FIRST: Final = 3.0
# Further seconds that a start waits for the record of an earlier daemon with its id to vanish.
_VANISHING: Final = RECORD_SECONDS + 5.0
# Seconds from the first reason to change the ring to the change, so that nodes that start together make one change.
_SETTLE: Final = 0.5
# Seconds after which the node of the next rank makes the change that the one before has not made.
_STEP: Final = 2.0
_REFRESH: Final = 1.0
# Least seconds between two updates of the view: one takes 12 ms with 1,000 nodes, which may all start at the same time.
_GATHER: Final = 0.1
# Most nodes of another cluster that a message names.
_SHOWN: Final = 5


class SharedMembership:
    """The nodes that have records in a store. Used on the event loop, but for `view`."""

    def __init__(
        self, store: RecordStore, record: NodeRecord, grace: float, state_dir: Path, vanishing: float = _VANISHING
    ) -> None:
        """record: of this node. state_dir: directory for the last known state. vanishing: seconds that a start waits
        for the record of an earlier daemon of this node to vanish."""
        self._store = store
        self._record = record
        self._state_dir = state_dir
        self._vanishing = vanishing
        self._roster = Roster(record.id, grace)
        self._listeners: list[Listener] = []
        self._problem = ""
        self._latest: Stored | None = None  # not taken in yet
        self._taken_in = float("-inf")  # monotonic time of the last update
        self._version: object = 0
        self._is_read = False  # has the store been read since this start?
        self._has_ring = False  # has the store a ring?
        # Monotonic time since when the ring differs from the wanted one; None if it does not.
        self._unlike: float | None = None
        self._strangers = ""  # the problem of nodes of another cluster in the same place of the store, or ""
        # Names of these clusters, and whether this node was shut out, when that was last logged.
        self._said_of: tuple[frozenset[str], bool] = (frozenset(), False)
        self._is_shut_out = False  # does one of them have the ring?
        self._other: NodeRecord | None = None  # another running node with this one's id
        self._read = asyncio.Event()  # the store has been read, or does not answer
        self._answered = asyncio.Event()  # the store has a record with this node's id, or does not answer
        self._claimed = asyncio.Event()
        self._fresh = asyncio.Event()
        self._changed = asyncio.Event()
        self._refreshed = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self._saved: LastKnown | None = None
        self._roster.update({record.id: record}, None, time.monotonic())
        self.view = self._roster.view(store.source, "")

    # --- used by other modules of the node ---------------------------------------------------------------------------

    def listen(self, callback: Listener) -> None:
        self._listeners.append(callback)

    async def start(self) -> None:
        self._store.put(self._record)
        self._store.start(self)
        saving = autosave(self._save, "a daemon that starts without it begins alone")
        self._tasks = [asyncio.create_task(work) for work in (self._keep_ring(), saving)]
        async with asyncio.TaskGroup() as group:
            group.create_task(_in_time(self._read, _FIRST))
            group.create_task(_in_time(self._answered, _FIRST))
        if not self._is_read:
            self._remember()
        if (other := self._other) is None:
            return
        log.info("a record of %s at %s has this node's id; waiting until it vanishes", other.name, other.address)
        if not await _in_time(self._claimed, self._vanishing):
            await self.stop()
            raise ConfigError(self._says_taken(other))

    async def announce(self, state: State) -> None:
        self._record = dataclasses.replace(self._record, state=state)
        self._store.put(self._record)
        self._roster.update({**self._roster.records, self._record.id: self._record}, None, time.monotonic())
        self._redraw()

    async def refresh(self) -> None:
        now = time.monotonic()
        if self._stopped or now - self._refreshed < _REFRESH:
            return
        self._refreshed = now
        self._fresh.clear()
        self._store.refresh()
        await _in_time(self._fresh, _REFRESH)

    def heard(self, node_id: str, incarnation: str = "") -> None:
        """Take a peer's new incarnation while the store does not answer. Otherwise the store knows which nodes are
        up."""
        record = self._roster.records.get(node_id)
        is_news = record is not None and incarnation not in ("", record.incarnation) and node_id != self._record.id
        if record is not None and is_news and self._problem:
            again = dataclasses.replace(record, incarnation=incarnation)
            self._roster.update({**self._roster.records, node_id: again}, None, time.monotonic())
            self._redraw()

    def lost(self, node_id: str) -> None:
        """Do nothing: the store knows which nodes are up."""

    def learned(self, record: NodeRecord) -> None:
        """Do nothing: the store has all records."""

    async def leave(self) -> None:
        await self.stop()
        self._latest, self._problem, self._other = None, "", None
        # Without other nodes in the view, none is followed, asked or waited for: they would refuse this one.
        self._roster.update({self._record.id: self._record}, Ring(self._roster.ring.epoch), time.monotonic())
        self._redraw()

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

    def stored(self, stored: Stored) -> None:
        """Receive the content of the store."""
        if self._latest is None and not self._stopped:
            pause = max(0.0, self._taken_in + _GATHER - time.monotonic())
            asyncio.get_running_loop().call_later(pause, self._take_in)
        self._latest = stored

    def _take_in(self) -> None:
        """Update the view from the last content; earlier ones are skipped."""
        stored, self._latest, self._taken_in = self._latest, None, time.monotonic()
        if stored is None or self._stopped:
            return
        self._is_read = True
        known = {each: record for each, record in stored.records.items() if self._is_ours(record)}
        ring = self._own_ring(stored, known)
        self._version, self._has_ring = stored.version, ring is not None
        self._roster.update({**known, self._record.id: self._record}, ring, time.monotonic())
        self._read.set()
        self._fresh.set()
        self._redraw()

    def _is_ours(self, record: NodeRecord) -> bool:
        """Return whether a record is of this node's cluster. Nodes of the last release do not name it, and count."""
        return not (record.cluster and self._record.cluster) or record.cluster == self._record.cluster

    def _own_ring(self, stored: Stored, known: Mapping[str, NodeRecord]) -> Ring | None:
        """Return the ring without nodes of other clusters; None without a ring, or if it is another cluster's: that of
        the cluster with the most nodes in it. Other clusters leave it alone, else they would replace each other's ring
        endlessly."""
        strangers = {each: record for each, record in stored.records.items() if each not in known}
        ring = stored.ring
        self._is_shut_out = ring is not None and self._is_of_others(ring, stored)
        said = self._says_strangers(list(strangers.values()))
        clusters = frozenset(record.cluster for record in strangers.values())
        if said and (clusters, self._is_shut_out) != self._said_of:
            log.warning("%s", said)
        self._strangers, self._said_of = said, (clusters, self._is_shut_out)
        if ring is None or self._is_shut_out:
            return None
        return Ring(ring.epoch, tuple(node for node in ring.nodes if node.id not in strangers))

    def _is_of_others(self, ring: Ring, stored: Stored) -> bool:
        records = (stored.records.get(node.id) for node in ring.nodes)
        counts = Counter(record.cluster for record in records if record is not None and record.cluster)
        owner = min(counts, key=lambda name: (-counts[name], name), default=self._record.cluster)
        return bool(self._record.cluster) and owner != self._record.cluster

    def _says_strangers(self, strangers: Sequence[NodeRecord]) -> str:
        if not strangers:
            return ""
        shown = shown_names(sorted(record.name for record in strangers), _SHOWN)
        return (
            f"nodes of cluster {min(record.cluster for record in strangers)!r} ({shown}) are in the same place of "
            f"{self._store.source} as this one of cluster {self._record.cluster!r}; give each cluster a prefix, or a "
            "name, of its own" + "; until then this node shares nothing" * self._is_shut_out
        )

    def claimed(self) -> None:
        """Note that the store has this node's record."""
        self._claimed.set()
        self._answered.set()
        if self._other is not None:
            self._other = None
            log.info("this node has its id for itself again")
            self._redraw()

    def taken(self, record: NodeRecord) -> None:
        """Note that another running node has this node's id."""
        self._answered.set()
        if self._other is None and self._claimed.is_set():
            log.warning("%s", self._says_taken(record))
        self._other = record
        self._claimed.clear()
        self._redraw()

    def problem(self, text: str) -> None:
        """Note a problem with the store; "" if there is none any more."""
        if text == self._problem:
            return
        if not text:
            log.info("%s answers again", self._store.source)
        elif not self._problem:  # the reason may change with every attempt
            log.warning("%s; the cluster goes on as it was known before", text)
        self._problem = text
        self._read.set()
        self._answered.set()
        self._redraw()

    def fresh(self) -> None:
        """Note that the view is up to date."""
        self._fresh.set()

    # --- last known state --------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Begin with the state that an earlier daemon saved, until the store answers."""
        if (found := last_known.load(self._state_dir, self._record.id)) is not None:
            ring, records = found
            log.info("beginning with the %d nodes that were known last", len(records))
            self._roster.update({**records, self._record.id: self._record}, ring, time.monotonic())
            self._redraw()

    async def _save(self) -> None:
        """Save the known state if it has changed. Raises OSError."""
        roster = self._roster
        known = LastKnown(roster.me, roster.ring.epoch, roster.ring.nodes, tuple(roster.records.values()))
        if self._is_read and known != self._saved:
            await asyncio.get_running_loop().run_in_executor(None, last_known.save, self._state_dir, known)
            self._saved = known

    # --- the ring ----------------------------------------------------------------------------------------------------

    async def _keep_ring(self) -> None:
        """Change the ring, until the end, whenever it is not the wanted one and this node is the one to change it."""
        while True:
            pause = self._propose(time.monotonic())
            self._changed.clear()
            await _in_time(self._changed, pause)

    def _propose(self, now: float) -> float:
        """Propose a ring if it is time for that. Return the seconds until it may be time."""
        nodes = self._roster.wanted(now)
        is_right = nodes == self._roster.ring.nodes and (self._has_ring or not nodes)
        if is_right or self._problem or self._is_shut_out or not self._claimed.is_set():
            self._unlike = None
            grace = self._roster.next_change(now)
            return 60.0 if grace is None else grace + 0.01
        if self._unlike is None:
            self._unlike = now
        due = self._unlike + _SETTLE + _STEP * self._roster.leader_rank()
        if now < due:
            return due - now
        self._unlike = now  # propose again if this fails
        self._store.propose(Ring(self._roster.ring.epoch + 1, nodes), self._version)
        return _SETTLE

    def _redraw(self) -> None:
        """Update the view, and call the listeners if it has changed."""
        problem = self._says_taken(self._other) if self._other is not None else self._problem or self._strangers
        before, view = self.view, self._roster.view(self._store.source, problem)
        self._changed.set()
        if (before.epoch, before.members, before.ring, before.problem) == (
            view.epoch, view.members, view.ring, view.problem,
        ):  # fmt: skip
            return
        self.view = view
        if not self._stopped:
            _tell_changes(before, view)
        for callback in self._listeners:
            try:
                callback(view)
            except Exception:  # a bug of one listener must not affect the others
                log.exception("internal error of a part that was told of a change of the cluster")

    def _says_taken(self, other: NodeRecord) -> str:
        return (
            f"the node {other.name} at {other.address} runs with the id of this one ({other.id}): was "
            f"{self._state_dir} copied? Remove {self._state_dir}/node here, and this node has a new id"
        )


def _tell_changes(before: ClusterView, view: ClusterView) -> None:
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


async def _in_time(event: asyncio.Event, seconds: float) -> bool:
    """Wait for *event*. Return whether it is set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
