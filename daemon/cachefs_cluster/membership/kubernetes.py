"""Kubernetes Leases as the store of a cluster's records: one for each node, and one for the ring.

A Lease of Kubernetes does not expire by itself: its watchers see that it is not renewed any more. So each node judges
by what it sees, with its own clock, which stands still while nothing can be seen. The work runs in a thread with its
own event loop, as that of the daemon may be busy for seconds.
"""

import asyncio
import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from cachefs.backoff import Backoff
from cachefs.errors import CachefsError
from cachefs_cluster.membership.kubernetes_api import (
    Lease,
    LeaseApi,
    LeaseApiSettings,
    LeaseConflict,
    LeaseNotFound,
    LeaseWatchExpired,
)
from cachefs_cluster.membership.ring import Ring, decode_ring
from cachefs_cluster.membership.store import RECORD_SECONDS, StoreContent, StoreListener
from cachefs_cluster.membership.view import NodeRecord, decode_record, encode_record

log = logging.getLogger(__name__)

LABEL: Final = "cachefs.io/cluster"
RECORD: Final = "cachefs.io/record"
RING: Final = "cachefs.io/ring"
EPOCH: Final = "cachefs.io/epoch"
_CALL_SHARE: Final = 0.9
# Seconds until a failed step is repeated: at first, and at most; and for which a watch succeeds before it begins anew.
_MIN_PAUSE: Final = 0.2
_MAX_PAUSE: Final = 5.0
_SUCCESS_SECONDS: Final = 10.0
_END_SECONDS: Final = 3.0
# Most seconds that clocks of machines differ; with more, a node is seen one renewal later.
_CLOCK_SKEW: Final = 30.0


class _NodeIdTaken(CachefsError):
    """Another running node has the Lease with this node's id."""


@dataclass(slots=True)
class _LeaseState:
    """The Lease of a node."""

    record: NodeRecord
    version: str
    # The renewTime in the Lease.
    renewed: str
    # Last change of `renewed`, by the clock of what can be seen. None: an old Lease, not seen to be renewed.
    renewed_at: float | None


class KubernetesStore:
    """Keeps records in Leases (see store.RecordStore)."""

    source: Final = "kubernetes"

    def __init__(self, settings: LeaseApiSettings, cluster: str, node_id: str, seconds: float = RECORD_SECONDS) -> None:
        """seconds: after which a Lease without renewal counts as gone."""
        self._settings = settings
        self._cluster = cluster
        self._name_prefix = f"cachefs-{xxhash.xxh3_64_hexdigest(cluster.encode())[:8]}-"
        self._name = self._name_prefix + node_id
        self._ring_name = self._name_prefix + "ring"
        self._selector = f"{LABEL}={cluster}"
        self._seconds = seconds
        self._main: asyncio.AbstractEventLoop  # the daemon's loop
        self._loop: asyncio.AbstractEventLoop | None = None  # our loop
        self._listener: StoreListener
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        # The attributes below are used on our loop only.
        self._api: LeaseApi
        self._has_work = asyncio.Event()
        self._ended = asyncio.Event()
        self._record: NodeRecord | None = None
        self._has_unsaved_record = False
        self._proposal: tuple[Ring, str] | None = None
        self._own_lease: Lease | None = None  # this node's Lease on the server
        self._has_claimed = False
        self._rival_lease: tuple[str, float] | None = (
            None  # version of another node's Lease with our name, and since when
        )
        self._watch_task: asyncio.Task[None] | None = None
        self._refreshing = False
        self._leases: dict[str, _LeaseState] = {}  # by name
        self._ring: Ring | None = None
        self._ring_lease: Lease | None = None
        self._clock = 0.0  # clock of what can be seen: see the module
        self._is_watching = False
        self._published: StoreContent | None = None
        self._problems: dict[str, str] = {}
        self._invalid_leases: set[tuple[str, str]] = set()

    # --- on the daemon's event loop -----------------------------------------------------------------------------------

    def start(self, listener: StoreListener) -> None:
        self._main = asyncio.get_running_loop()
        self._listener = listener
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="kubernetes", daemon=True)
        self._thread.start()
        self._started.wait(_END_SECONDS)

    def set_record(self, record: NodeRecord) -> None:
        if self._loop is None:
            self._set_record(record)
        else:
            self._call_on_own_loop(self._set_record, record)

    def propose(self, ring: Ring, version: object) -> None:
        self._call_on_own_loop(self._set_proposal, ring, version)

    def refresh(self) -> None:
        self._call_on_own_loop(self._list_again)

    async def stop(self) -> None:
        self._call_on_own_loop(self._begin_end)
        if (thread := self._thread) is not None:
            await asyncio.get_running_loop().run_in_executor(None, thread.join, _END_SECONDS)

    def _call_on_own_loop(self, function: Callable[..., None], *values: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function, *values)

    # --- on our own event loop ----------------------------------------------------------------------------------------

    def _set_record(self, record: NodeRecord) -> None:
        self._record, self._has_unsaved_record = record, True
        self._has_work.set()

    def _set_proposal(self, ring: Ring, version: object) -> None:
        self._proposal = (ring, str(version or ""))
        self._has_work.set()

    def _list_again(self) -> None:
        self._refreshing = True
        if self._watch_task is not None:
            self._watch_task.cancel()

    def _begin_end(self) -> None:
        self._ended.set()
        self._has_work.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        if not await self._open():
            return
        tasks = [asyncio.create_task(work()) for work in (self._keep_lease, self._follow_leases, self._advance_clock)]
        await self._ended.wait()
        if self._watch_task is not None:
            tasks.append(self._watch_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(CachefsError):
            if self._own_lease is not None:
                await self._api.delete(self._name, self._own_lease["metadata"]["resourceVersion"])
        await self._api.close()

    async def _open(self) -> bool:
        """Open the API client as soon as the API server's CA can be read, which may still be on its way when a pod
        starts. Return False if the daemon ends first."""
        backoff = Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while not self._ended.is_set():
            try:
                self._api = LeaseApi(self._settings, self._seconds / 3 * _CALL_SHARE)
            except CachefsError as error:
                self._report_problem("keeper", str(error))
                await _wait(self._ended, backoff.note_failure(time.monotonic()), at_least=0.0)
            else:
                self._report_problem("keeper", "")
                return True
        return False

    # --- this node's Lease, and the ring ------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        """Renew the Lease, and write pending changes."""
        due, pause, backoff = 0.0, 0.0, Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while True:
            await _wait(self._has_work, pause or max(0.0, due - time.monotonic()), at_least=pause)
            self._has_work.clear()
            begun = time.monotonic()
            try:
                if self._record is not None and (self._has_unsaved_record or begun >= due):
                    await self._renew_lease(self._record)
                    due = begun + self._seconds / 3
                await self._write_ring()
            except CachefsError as error:
                if not isinstance(error, _NodeIdTaken):
                    self._report_problem("keeper", str(error))
                pause = backoff.note_failure(begun)
            except Exception as error:
                self._report_bug("keeper", error)
                pause = _MAX_PAUSE
            else:
                self._report_problem("keeper", "")
                backoff.reset()
                pause = 0.0

    async def _renew_lease(self, record: NodeRecord) -> None:
        """Write the record. Raises CachefsError; the record then stays to be written."""
        self._has_unsaved_record = True
        try:
            self._own_lease = await self._write_own(record, self._own_lease)
        except (LeaseConflict, LeaseNotFound):
            self._own_lease = await self._take_over_lease(record)
        if self._own_lease is not None:
            self._has_unsaved_record, self._has_claimed = self._record is not record, True
            self._call_on_main_loop(self._listener.on_claimed)

    async def _write_own(self, record: NodeRecord, before: Lease | None) -> Lease:
        lease = self._make_lease(self._name, {RECORD: encode_record(record).decode()}, record.incarnation)
        if before is None:
            return await self._api.create(lease)
        lease["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        return await self._api.update(lease)

    async def _take_over_lease(self, record: NodeRecord) -> Lease | None:
        """Take the Lease over, unless another node renews it. Raises LeaseConflict if it changes at that moment."""
        try:
            there = await self._api.get(self._name)
        except LeaseNotFound:
            return await self._write_own(record, None)
        other = _record_of(there)
        if other is not None and self._is_other_node(other, record, there["metadata"]["resourceVersion"]):
            self._call_on_main_loop(self._listener.on_id_taken, other)
            self._own_lease = None
            raise _NodeIdTaken(f"node {other.name} at {other.address} has this node's id")
        return await self._write_own(record, there)

    def _is_other_node(self, other: NodeRecord, record: NodeRecord, version: str) -> bool:
        """Return whether *other* is another node that renews the Lease, and not an earlier daemon of this one."""
        if other.incarnation == record.incarnation:
            return False
        if not self._has_claimed and other.address == record.address:
            return False
        if self._rival_lease is None or self._rival_lease[0] != version:
            self._rival_lease = (version, time.monotonic())
        return time.monotonic() - self._rival_lease[1] < self._seconds

    async def _write_ring(self) -> None:
        if self._proposal is None:
            return
        (ring, version), self._proposal = self._proposal, None
        lease = self._make_lease(self._ring_name, {RING: ring.encode().decode(), EPOCH: str(ring.epoch)}, "ring")
        with contextlib.suppress(LeaseConflict, LeaseNotFound):  # another node was quicker: the watch brings its ring
            if not version:
                await self._api.create(lease)
            else:
                lease["metadata"]["resourceVersion"] = version
                await self._api.update(lease)
            await self._delete_expired(ring)

    async def _delete_expired(self, ring: Ring) -> None:
        """Delete expired Leases of nodes that are not in the ring. No other process would."""
        placed = {self._name_prefix + node.id for node in ring.nodes}
        for name, seen in list(self._leases.items()):
            if name not in placed and name != self._name and not self._is_live(seen):
                with contextlib.suppress(LeaseConflict, LeaseNotFound):
                    await self._api.delete(name, seen.version)

    def _make_lease(self, name: str, annotations: dict[str, str], holder: str) -> Lease:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "labels": {LABEL: self._cluster}, "annotations": annotations},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": max(1, round(self._seconds)), "renewTime": now},
        }

    # --- Leases of other nodes ----------------------------------------------------------------------------------------

    async def _follow_leases(self) -> None:
        """List and watch the Leases, again and again."""
        backoff = Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while True:
            begun = time.monotonic()
            self._watch_task = asyncio.create_task(self._list_and_watch())
            await asyncio.wait([self._watch_task])
            self._is_watching = False
            if not self._watch_task.cancelled() and (error := self._watch_task.exception()) is not None:
                if not isinstance(error, CachefsError):
                    self._report_bug("watcher", error)
                elif not isinstance(error, LeaseWatchExpired):
                    self._report_problem("watcher", str(error))
            if time.monotonic() - begun > _SUCCESS_SECONDS:
                backoff.reset()
            pause = backoff.note_failure(begun)
            await asyncio.sleep(0 if self._refreshing else pause)

    async def _list_and_watch(self) -> None:
        self._refreshing = False
        leases, version = await self._api.list(self._selector)
        names = {lease["metadata"]["name"] for lease in leases}
        self._leases = {name: seen for name, seen in self._leases.items() if name in names}
        if self._ring_name not in names:
            self._ring = self._ring_lease = None
        for lease in leases:
            self._apply_lease(lease)
        self._is_watching = True
        self._publish(again=True)
        self._report_problem("watcher", "")
        # This node's own renewals are changes too: a watch that is silent for longer is dead.
        async for kind, lease in self._api.watch(self._selector, version, self._seconds):
            if kind == "DELETED":
                self._remove_lease(lease["metadata"]["name"])
            elif kind != "BOOKMARK":
                self._apply_lease(lease)
            self._publish()

    def _apply_lease(self, lease: Lease) -> None:
        """Take in a Lease that is new or has changed."""
        metadata = lease.get("metadata") or {}
        name, version = str(metadata.get("name", "")), str(metadata.get("resourceVersion", ""))
        annotations = metadata.get("annotations") or {}
        try:
            if name == self._ring_name:
                epoch = int(str(annotations.get(EPOCH, ""))[:18])
                self._ring_lease, self._ring = lease, None
                self._ring = decode_ring(str(annotations.get(RING, "")).encode(), epoch)
                return
            record = decode_record(str(annotations.get(RECORD, "")).encode())
            if name != self._name_prefix + record.id:
                raise ValueError("it is the record of another node")
        except ValueError as error:
            self._leases.pop(name, None)
            if (name, version) not in self._invalid_leases and len(self._invalid_leases) < 100:
                self._invalid_leases.add((name, version))
                log.warning("kubernetes: the Lease %r holds nothing of cachefs (%s) and is ignored", name, error)
            return
        renewed = str((lease.get("spec") or {}).get("renewTime", ""))
        known = self._leases.get(name)
        at: float | None = self._clock
        if known is None:
            at = self._clock if _age(renewed) < self._seconds + _CLOCK_SKEW else None
        elif known.renewed == renewed:
            at = known.renewed_at
        self._leases[name] = _LeaseState(record, version, renewed, at)

    def _remove_lease(self, name: str) -> None:
        self._leases.pop(name, None)
        if name == self._ring_name:
            self._ring = self._ring_lease = None
        if name == self._name and not self._ended.is_set():
            self._own_lease = None  # another client has removed it
            self._has_unsaved_record = True
            self._has_work.set()

    async def _advance_clock(self) -> None:
        """Advance the clock while Leases can be seen, and report those that have expired."""
        step = min(1.0, self._seconds / 10)
        last = time.monotonic()
        while True:
            await asyncio.sleep(step)
            now = time.monotonic()
            if self._is_watching and not self._problems.get("keeper"):
                self._clock += min(now - last, 2 * step)  # a process that was stopped has seen nothing
            last = now
            self._publish()

    def _is_live(self, seen: _LeaseState) -> bool:
        return seen.renewed_at is not None and self._clock - seen.renewed_at < self._seconds

    def _publish(self, *, again: bool = False) -> None:
        """Report the live records and the ring if they have changed, or *again*."""
        if self._published is None and not self._is_watching:
            return
        live = {seen.record.id: seen.record for seen in self._leases.values() if self._is_live(seen)}
        version = str(self._ring_lease["metadata"]["resourceVersion"]) if self._ring_lease is not None else ""
        stored = StoreContent(live, self._ring, version)
        if stored != self._published or again:
            self._published = stored
            self._call_on_main_loop(self._listener.on_content, stored)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report_problem(self, who: str, problem: str) -> None:
        if self._problems.get(who, "") != problem:
            self._problems[who] = problem
            self._call_on_main_loop(
                self._listener.on_problem, self._problems.get("keeper") or self._problems.get("watcher") or ""
            )

    def _report_bug(self, who: str, error: BaseException) -> None:
        """Report an unexpected exception. Its traceback is logged once, not with each attempt."""
        text = f"internal error ({error!r})"
        if self._problems.get(who, "") != text:
            log.error("%s: %s", self.source, text, exc_info=error)
        self._report_problem(who, text)

    def _call_on_main_loop(self, function: Callable[..., None], *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the daemon's loop has ended
            self._main.call_soon_threadsafe(function, *values)


def _record_of(lease: Lease) -> NodeRecord | None:
    annotations = (lease.get("metadata") or {}).get("annotations") or {}
    try:
        return decode_record(str(annotations.get(RECORD, "")).encode())
    except ValueError:
        return None


def _age(renewed: str) -> float:
    """Return the seconds since a renewTime, by this machine's clock; infinity if it is invalid."""
    try:
        then = datetime.datetime.fromisoformat(renewed)
        return abs((datetime.datetime.now(datetime.UTC) - then).total_seconds())
    except (ValueError, TypeError):
        return float("inf")


async def _wait(event: asyncio.Event, seconds: float, at_least: float) -> None:
    """Wait for *event*, at most *seconds*; or sleep for *at_least* seconds if that is not 0."""
    if at_least:
        await asyncio.sleep(at_least)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
