"""etcd as the store of a cluster's records: a key for each node, kept alive by a lease, and one for the ring.

The store has two threads, since a lease that is not kept alive in time makes a working node seem gone, and the event
loop may be busy for seconds. The keeper keeps lease and record, changes the ring, and checks whether the watch has
missed a change: no watch reports that itself (a stopped etcd, a network that drops all packets, a compaction). The
watcher reads all keys, follows their changes, and starts again whenever the watch ends.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from cachefs.backoff import Backoff
from cachefs.errors import CachefsError
from cachefs_cluster.membership.etcd_client import EtcdClient, EtcdSettings, EtcdUnavailable, EtcdWatch
from cachefs_cluster.membership.etcd_codec import KeyValue, WatchResponse
from cachefs_cluster.membership.ring import Ring, decode_ring
from cachefs_cluster.membership.store import RECORD_SECONDS, StoreContent, StoreListener
from cachefs_cluster.membership.view import NodeRecord, decode_record, encode_record

log = logging.getLogger(__name__)

# Share of the seconds between two keep-alives that a call may take.
_CALL_SHARE: Final = 0.9
# Seconds until a failed step is repeated: at first, and at most; and for which a watch succeeds before it begins anew.
_MIN_PAUSE: Final = 0.2
_MAX_PAUSE: Final = 2.0
_SUCCESS_SECONDS: Final = 10.0
# Most invalid keys that the log names.
_MAX_LOGGED: Final = 100
# Seconds that stopping may take.
_END_SECONDS: Final = 3.0


class _NodeIdTaken(CachefsError):
    """Another running node has this node's key."""


class EtcdStore:
    """Keeps records in etcd (see store.RecordStore)."""

    source: Final = "etcd"

    def __init__(self, settings: EtcdSettings, prefix: str, node_id: str, seconds: float = RECORD_SECONDS) -> None:
        """prefix: of the keys, without a slash at its end. seconds: lifetime of a record without keep-alives."""
        self._settings = settings
        self._prefix = f"{prefix}/".encode()
        self._nodes = f"{prefix}/nodes/".encode()
        self._ring_key = f"{prefix}/ring".encode()
        self._key = self._nodes + node_id.encode()
        self._seconds = seconds
        self._step_seconds = seconds / 3
        self._call_seconds = self._step_seconds * _CALL_SHARE
        self._client: EtcdClient
        self._loop: asyncio.AbstractEventLoop
        self._listener: StoreListener
        self._threads: list[threading.Thread] = []
        # Guards the attributes below, up to `_problems`.
        self._condition = threading.Condition()
        self._stopping = False
        self._record: NodeRecord | None = None
        self._has_unsaved_record = False
        self._proposal: tuple[Ring, int] | None = None
        self._is_check_requested = False  # check now instead of at the next step
        self._watch: EtcdWatch | None = None
        self._watch_number = 0  # number of the watch: raised to restart it
        self._newest_revision = 0  # revision of the last change that the watcher has seen
        self._key_count = 0  # number of keys that the watcher has seen
        self._problems: dict[str, str] = {}  # by thread
        # Used by the watcher only.
        self._invalid_keys: set[KeyValue] = set()
        # Used by the keeper only.
        self._lease = 0
        self._revision = 0  # of this node's key
        self._has_claimed = False
        self._suspected_gap: tuple[int, int] | None = None  # the watcher's state when it seemed to have missed a change

    # --- on the event loop -------------------------------------------------------------------------------------------

    def start(self, listener: StoreListener) -> None:
        self._client = EtcdClient(self._settings)
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        for name, work in (("etcd-keeper", self._run_keeper), ("etcd-watcher", self._run_watcher)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def set_record(self, record: NodeRecord) -> None:
        with self._condition:
            self._record, self._has_unsaved_record = record, True
            self._condition.notify_all()

    def propose(self, ring: Ring, version: object) -> None:
        with self._condition:
            self._proposal = (ring, version if isinstance(version, int) else 0)
            self._condition.notify_all()

    def refresh(self) -> None:
        with self._condition:
            self._is_check_requested = True
            self._condition.notify_all()

    async def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._restart_watch()
            self._condition.notify_all()
        await asyncio.get_running_loop().run_in_executor(None, self._join_threads)

    def _join_threads(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._client.close()

    # --- the keeper --------------------------------------------------------------------------------------------------

    def _run_keeper(self) -> None:
        due, pause, backoff = 0.0, 0.0, Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while self._wait_for_work(due, pause):
            begun = time.monotonic()
            try:
                is_due = begun >= due
                if is_due:
                    self._keep_lease()
                    due = begun + self._step_seconds
                self._write_pending()
                if is_due or self._is_check_requested:
                    self._check_watch()
            except CachefsError as error:
                if not isinstance(error, _NodeIdTaken):
                    self._report_problem("keeper", str(error))
                pause = backoff.note_failure(begun)
                due = 0.0
                if isinstance(error, EtcdUnavailable):
                    with self._condition:
                        self._restart_watch()
            except Exception as error:
                self._report_bug("keeper", error)
                pause = _MAX_PAUSE
            else:
                self._report_problem("keeper", "")
                backoff.reset()
                pause = 0.0
        self._revoke_lease()

    def _wait_for_work(self, due: float, pause: float) -> bool:
        """Wait for work, or for *pause* seconds after a failure. Return False at the end."""
        with self._condition:
            if pause:
                self._condition.wait_for(lambda: self._stopping, pause)
            else:
                self._condition.wait_for(
                    lambda: (
                        self._stopping
                        or self._has_unsaved_record
                        or self._is_check_requested
                        or self._proposal is not None
                    ),
                    max(0.0, due - time.monotonic()),
                )
            return not self._stopping

    def _keep_lease(self) -> None:
        if self._lease and self._client.keep_alive(self._lease, self._call_seconds) <= 0:
            log.warning(
                "the lease of this node in etcd has expired (no keep-alive for %.0f s); joining again", self._seconds
            )
            self._lease = 0
        if not self._lease:
            self._lease = self._client.grant_lease(max(1, round(self._seconds)), self._call_seconds)
            self._has_unsaved_record = True

    def _write_pending(self) -> None:
        """Write the record and the proposed ring. Raises CachefsError; the record then stays to be written."""
        with self._condition:
            record, proposal = self._record, self._proposal
            unsaved, self._has_unsaved_record, self._proposal = self._has_unsaved_record, False, None
        if unsaved and record is not None:
            try:
                self._save_record(record)
            except CachefsError:
                self._has_unsaved_record = True
                raise
        if proposal is not None:
            ring, version = proposal
            self._client.put_if(self._ring_key, ring.encode(), 0, version, self._call_seconds)

    def _save_record(self, record: NodeRecord) -> None:
        text = encode_record(record)
        for _ in range(3):
            response = self._client.put_if(self._key, text, self._lease, self._revision, self._call_seconds)
            if response.is_done:
                self._revision, self._has_claimed = response.revision, True
                self._call_on_loop(self._listener.on_claimed)
                return
            there = response.found[0] if response.found else None
            other = _decode_or_none(there) if there is not None else None
            if other is not None and self._is_other_node(other, record):
                self._call_on_loop(self._listener.on_id_taken, other)
                raise _NodeIdTaken(f"node {other.name} at {other.address} has this node's id")
            self._revision = there.revision if there is not None else 0
        raise EtcdUnavailable("this node's key in etcd changes all the time")

    def _is_other_node(self, other: NodeRecord, record: NodeRecord) -> bool:
        """Return whether *other* is a running node and not an earlier daemon of this one. While this daemon listens at
        its address, no other daemon can be there."""
        if other.incarnation == record.incarnation:
            return False
        return self._has_claimed or other.address != record.address

    def _check_watch(self) -> None:
        """Restart the watch if it has missed a change."""
        with self._condition:
            was_requested, self._is_check_requested = self._is_check_requested, False
        response = self._client.read_range(self._prefix, self._call_seconds, prefix=True, newest=True)
        newest = response.found[0].revision if response.found else 0
        with self._condition:
            known = (self._newest_revision, self._key_count)
            went_back = response.revision < self._newest_revision
            missed = newest > self._newest_revision or response.count != self._key_count
            # A change may still be on its way; if it has not arrived by the next check, it is lost. A caller of
            # `refresh` has already waited.
            if went_back or (missed and (was_requested or known == self._suspected_gap)):
                self._restart_watch()
            self._suspected_gap = known if missed else None
        if not missed:
            self._call_on_loop(self._listener.on_fresh)

    def _revoke_lease(self) -> None:
        with contextlib.suppress(CachefsError):
            if self._lease:
                self._client.revoke_lease(self._lease, _END_SECONDS / 2)

    # --- the watcher -------------------------------------------------------------------------------------------------

    def _run_watcher(self) -> None:
        backoff = Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while True:
            begun = time.monotonic()
            try:
                self._follow_changes()
            except CachefsError as error:
                if self._stopping:
                    return
                self._report_problem("watcher", str(error))
            except Exception as error:
                self._report_bug("watcher", error)
            if time.monotonic() - begun > _SUCCESS_SECONDS:
                backoff.reset()
            with self._condition:
                if self._condition.wait_for(lambda: self._stopping, backoff.note_failure(begun)):
                    return

    def _follow_changes(self) -> None:
        """Read all keys, and follow their changes until the watch ends."""
        with self._condition:
            number = self._watch_number
        response = self._client.read_range(self._prefix, self._call_seconds, prefix=True)
        endpoint = self._client.endpoint
        contents = _EtcdContents(self._nodes, self._ring_key, response.found, self._invalid_keys)
        self._publish(contents)
        self._report_problem("watcher", "")
        watch = self._client.watch(self._prefix, response.revision + 1)
        with self._condition:
            self._watch = watch
            if self._stopping or self._watch_number != number:
                watch.cancel()
        try:
            for message in watch:
                if message.has_ended:
                    return  # also if its revision is compacted: all keys are read again
                if contents.apply(message) and not message.fragment:
                    self._publish(contents)
        except EtcdUnavailable:  # no problem if another endpoint answers
            self._client.switch_endpoint(endpoint)

    def _publish(self, contents: "_EtcdContents") -> None:
        with self._condition:
            self._newest_revision, self._key_count = contents.newest_revision, len(contents)
            mine = self._record
            if self._has_claimed and mine is not None and contents.incarnation(mine.id) != mine.incarnation:
                self._has_unsaved_record = True  # another client has removed or replaced this node's record
                self._condition.notify_all()
        self._call_on_loop(self._listener.on_content, contents.store_content())

    # --- used by both threads ----------------------------------------------------------------------------------------

    def _restart_watch(self) -> None:
        """End the watch, so that all keys are read again. The caller holds the condition."""
        self._watch_number += 1
        if self._watch is not None:
            self._watch.cancel()

    def _report_problem(self, who: str, problem: str) -> None:
        with self._condition:
            if self._problems.get(who, "") == problem:
                return
            self._problems[who] = problem
            shown = self._problems.get("keeper") or self._problems.get("watcher") or ""
        self._call_on_loop(self._listener.on_problem, shown)

    def _report_bug(self, who: str, error: BaseException) -> None:
        """Report an unexpected exception. Its traceback is logged once, not with each attempt."""
        text = f"internal error ({error!r})"
        if self._problems.get(who, "") != text:
            log.error("%s: %s", self.source, text, exc_info=error)
        self._report_problem(who, text)

    def _call_on_loop(self, function: Callable[..., None], *values: Any) -> None:
        """Call *function* on the event loop, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *values)


class _EtcdContents:
    """The keys below the prefix, decoded."""

    def __init__(self, nodes: bytes, ring_key: bytes, found: tuple[KeyValue, ...], nonsense: set[KeyValue]) -> None:
        """nonsense: invalid keys that were logged already, each once."""
        self._nodes = nodes
        self._ring_key = ring_key
        self._found = {each.key: each for each in found}
        self._records: dict[str, NodeRecord] = {}
        self._ring: Ring | None = None
        self._deleted = 0  # revision of the last deletion
        self._invalid_keys = nonsense
        for each in found:
            self._decode_key(each)

    def __len__(self) -> int:
        return len(self._found)

    def incarnation(self, node_id: str) -> str:
        """Return the incarnation in a node's record, or ""."""
        return self._records[node_id].incarnation if node_id in self._records else ""

    @property
    def newest_revision(self) -> int:
        """Revision of the last change."""
        return max([self._deleted, *(each.revision for each in self._found.values())])

    def store_content(self) -> StoreContent:
        ring = self._found.get(self._ring_key)
        return StoreContent(dict(self._records), self._ring, ring.revision if ring is not None else 0)

    def apply(self, message: WatchResponse) -> bool:
        """Apply changes. Return whether there were any."""
        for gone, change in message.puts_and_deletes:
            if gone:
                self._found.pop(change.key, None)
                self._deleted = max(self._deleted, change.revision)
                self._remove_key(change.key)
            else:
                self._found[change.key] = change
                self._decode_key(change)
        return bool(message.puts_and_deletes)

    def _remove_key(self, key: bytes) -> None:
        if key == self._ring_key:
            self._ring = None
        elif key.startswith(self._nodes):
            self._records.pop(key[len(self._nodes) :].decode("ascii", "replace"), None)

    def _decode_key(self, change: KeyValue) -> None:
        self._remove_key(change.key)
        try:
            if change.key == self._ring_key:
                self._ring = decode_ring(change.value, change.revision)
            elif change.key.startswith(self._nodes):
                record = decode_record(change.value)
                if self._nodes + record.id.encode() != change.key:
                    raise ValueError("it is the record of another node")
                self._records[record.id] = record
        except ValueError as error:
            if change not in self._invalid_keys and len(self._invalid_keys) < _MAX_LOGGED:
                self._invalid_keys.add(change)
                log.warning("etcd: the key %r holds nothing of cachefs (%s) and is ignored", change.key, error)


def _decode_or_none(found: KeyValue) -> NodeRecord | None:
    try:
        return decode_record(found.value)
    except ValueError:
        return None
