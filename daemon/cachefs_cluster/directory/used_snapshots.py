"""Keeps snapshots on this node for as long as mounts or jobs of any node of the cluster read them.

A mount stays at its first snapshot, and so does its job, however often the dataset is refreshed meanwhile. The blocks
of that snapshot have homes on all nodes. So each node publishes the snapshots read on it, and the others keep these,
and fetch those that they lack, until no node reads them any more: also nodes that join later, and after the dataset was
removed. Snapshots kept for other nodes are bounded in number and bytes, and must belong to datasets that are or were in
the cluster.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec

from cachefs.backoff import Backoff
from cachefs.errors import Busy, CachefsError
from cachefs.formatting import format_names
from cachefs.messages import RemoteMount
from cachefs.sizes import format_size
from cachefs_cluster.sharing.sections import MOUNTED, USED, MountedDataset, UsedSnapshot
from cachefs_cluster.sharing.snapshot_files import SnapshotFiles
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.records import DatasetRecord
from cachefs_daemon.ports import LocalRead
from cachefs_daemon.runtime.error_log import ErrorLog

log = logging.getLogger(__name__)

# Seconds for which news is gathered; and between two checks of reads here and elsewhere.
GATHER_SECONDS: Final = 0.05
CHECK_SECONDS: Final = 2.0
# Seconds for which a snapshot is kept after the last node stopped publishing it: the node may come back, or this one
# has just started.
GRACE_SECONDS: Final = 600.0
# Snapshots kept for other nodes, and their bytes beyond the regular generations of each dataset.
MAX_KEPT: Final = 64
MAX_BYTES: Final = 32 << 30
# Largest ratio between the file sizes of one snapshot on two nodes: each has listed it by itself.
_MAX_SIZE_RATIO: Final = 2
# First and last pause in seconds before a failed snapshot is fetched again: doubled each time.
MIN_RETRY_PAUSE: Final = 1.0
MAX_RETRY_PAUSE: Final = 60.0
# Nodes named in a line, and lines listed.
_MAX_NAMED_NODES: Final = 3
_MAX_PROBLEMS: Final = 20


@dataclass(frozen=True, slots=True)
class LocalDatasets:
    """Access to this node's datasets and their readers."""

    catalog: Catalog
    open_snapshots: OpenSnapshots
    changes: DatasetChanges
    errors: ErrorLog
    # Returns the mountpoint of a dataset on this node; empty if it is not mounted.
    mountpoint_of: Callable[[str], str]
    # Returns the current reads of mounts and jobs of this node.
    current_reads: Callable[[], Iterable[LocalRead]]


@dataclass(slots=True)
class _RemoteSnapshot:
    """A snapshot that other nodes read, and that is not current here."""

    value: UsedSnapshot
    # Ids of the nodes that read it.
    nodes: list[str] = field(default_factory=list)


class _NoLongerUsed(CachefsError):
    """The snapshot is not wanted any more."""


@dataclass(slots=True)
class _Failure:
    reason: str
    # In monotonic seconds.
    backoff: Backoff = field(default_factory=lambda: Backoff(MIN_RETRY_PAUSE, MAX_RETRY_PAUSE))


class UsedSnapshots:
    """Publishes reads of this node, and follows those of others. Used on the event loop."""

    def __init__(
        self,
        shared: SharedState,
        files: SnapshotFiles,
        local: LocalDatasets,
        is_coming_as_current: Callable[[str], bool],
    ) -> None:
        """is_coming_as_current: returns whether a snapshot is on its way here as the current one of its dataset."""
        self._shared = shared
        self._files = files
        self._local = local
        self._is_coming_as_current = is_coming_as_current
        self._reserved: dict[str, int] = {}  # by snapshot being fetched: bytes reserved for its file
        self._wakeup = asyncio.Event()
        self._used_elsewhere: dict[str, _RemoteSnapshot] = {}  # by snapshot: those that are or should be kept
        self._beyond_limit: dict[str, _RemoteSnapshot] = {}  # by snapshot: those beyond MAX_KEPT
        self._kept_until: dict[str, float] = {}  # by snapshot: monotonic time until which it is kept at least
        self._fetch_tasks: dict[str, asyncio.Task[None]] = {}  # by snapshot
        self._failures: dict[str, _Failure] = {}  # by snapshot

    # --- queries ------------------------------------------------------------------------------------------------------

    def is_used(self, snapshot_id: str) -> bool:
        """Return whether another node reads the snapshot, or did within GRACE_SECONDS."""
        return time.monotonic() < self._kept_until.get(snapshot_id, 0.0)

    def keep_if_read(self, snapshot_id: str) -> bool:
        """Return whether another node publishes that it reads the snapshot, even a current one. If so, keep it like the
        others."""
        if not any(snapshot_id in values for values in self._shared.remote_values(USED).values()):
            return False
        self._kept_until[snapshot_id] = time.monotonic() + GRACE_SECONDS
        return True

    def is_read(self, snapshot_id: str) -> bool:
        """Return whether any node, this one included, reads the snapshot now."""
        return snapshot_id in self._used_elsewhere or self._shared.publishes(USED, snapshot_id)

    def is_coming(self, snapshot_id: str) -> bool:
        """Return whether the snapshot is on its way here."""
        return snapshot_id in self._fetch_tasks

    def is_transferring(self, snapshot_id: str) -> bool:
        """Return whether the file of the snapshot has had its turn and is being fetched."""
        return snapshot_id in self._reserved

    @property
    def is_catching_up(self) -> bool:
        """Whether any snapshot is on its way here."""
        return bool(self._fetch_tasks)

    def problems(self) -> list[str]:
        """Return the snapshots that other nodes read and this one lacks, one line each."""
        lines = []
        for snapshot_id, remote in sorted([*self._used_elsewhere.items(), *self._beyond_limit.items()]):
            if self._local.open_snapshots.get(snapshot_id) is not None:
                continue
            failure = self._failures.get(snapshot_id)
            if snapshot_id in self._beyond_limit:
                why = f"{MAX_KEPT} older snapshots are kept already; mount the dataset again where they are read"
            else:
                why = f"{failure.reason}; trying again" if failure is not None else "it is being fetched"
            lines.append(
                f"dataset {remote.value.dataset}: snapshot {snapshot_id[:12]}, which "
                f"{self._readers_text(remote.nodes)}, is not on this node, so other nodes fetch its blocks: {why}"
            )
        return lines[:_MAX_PROBLEMS] + ([f"{len(lines) - _MAX_PROBLEMS} more"] if len(lines) > _MAX_PROBLEMS else [])

    def check_not_mounted_elsewhere(self, name: str) -> None:
        """Raise Busy if another node has mounted the dataset."""
        for node, values in self._shared.remote_values(MOUNTED).items():
            record, value = self._shared.node_record(node), values.get(name)
            if value is not None and record is not None:
                raise Busy(f"dataset {name} is mounted at {value.mountpoint} on node {record.name}; unmount that first")

    def outdated_mounts(self, name: str, current: str) -> list[RemoteMount]:
        """Return the mounts of other nodes that stay at a snapshot of the dataset other than *current*."""
        return [
            RemoteMount(node=record.name, mountpoint=value.mountpoint, snapshot=snapshot_id)
            for node, values in self._shared.remote_values(USED).items()
            for snapshot_id, value in values.items()
            if value.dataset == name and value.mountpoint and snapshot_id != current
            and (record := self._shared.node_record(node)) is not None
        ]  # fmt: skip

    def note_reads_changed(self) -> None:
        """Check reads again soon: a mount or a job has begun or ended."""
        self._wakeup.set()

    # --- main loop ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Keep all present snapshots for a while, as other nodes have not published their reads yet."""
        until = time.monotonic() + GRACE_SECONDS
        self._kept_until = {one.id: until for one in self._local.catalog.read_snapshots(lambda _: True)}
        self._shared.add_listener(USED, lambda node, name, value: self._wakeup.set())

    async def run(self) -> None:
        try:
            while True:
                self._wakeup.clear()
                self._publish_and_follow()
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wakeup.wait()
                except TimeoutError:
                    pass
                await asyncio.sleep(GATHER_SECONDS)
        finally:
            tasks = list(self._fetch_tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _publish_and_follow(self) -> None:
        try:
            self._publish()
            self._follow_other_nodes()
        except Exception as error:
            self._local.errors.add("datasets", f"internal error with snapshots that are read ({error!r})", bug=error)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        mounted: dict[str, MountedDataset] = {}
        used: dict[str, UsedSnapshot] = {}
        for read in self._local.current_reads():
            dataset, path = self._local.catalog.find(read.dataset), _printable(read.mountpoint)
            if dataset is None or not dataset.record.added:
                continue
            if path:
                mounted.setdefault(read.dataset, MountedDataset(path))
            for snapshot_id in read.snapshots:
                published = used.get(snapshot_id)
                if published is None or (read.stays_after_refresh and not published.mountpoint):
                    value = self._published_value(dataset.record, snapshot_id, path if read.stays_after_refresh else "")
                    used.update({snapshot_id: value} if value is not None else {})
        for name in set(self._shared.published_names(MOUNTED)) - set(mounted):
            self._shared.remove(MOUNTED, name)
        for name in set(self._shared.published_names(USED)) - set(used):
            self._shared.remove(USED, name)
        for name, mount in mounted.items():
            self._shared.publish(MOUNTED, name, mount)
        for name, value in list(used.items())[: USED.max_values]:
            self._shared.publish(USED, name, value)

    def _published_value(self, record: DatasetRecord, snapshot_id: str, mountpoint: str) -> UsedSnapshot | None:
        snapshot = self._local.open_snapshots.get(snapshot_id)
        if snapshot is None:
            return None
        size = self._local.open_snapshots.file_size(snapshot_id)
        value = UsedSnapshot(record.name, record.added, max(1, size), snapshot.block_size, mountpoint)
        if not self._local.catalog.removals.is_removed(record.name, record.added):
            return value
        return msgspec.structs.replace(value, url=record.url, options=record.options, named=record.named)

    # --- following other nodes ----------------------------------------------------------------------------------------

    def _follow_other_nodes(self) -> None:
        """Keep the snapshots that other nodes read, and fetch missing ones."""
        self._used_elsewhere, self._beyond_limit = self._split_at_limit(self._read_elsewhere())
        now = time.monotonic()
        self._kept_until = {one: until for one, until in self._kept_until.items() if until > now}
        self._kept_until.update(dict.fromkeys(self._used_elsewhere, now + GRACE_SECONDS))
        self._failures = {one: failure for one, failure in self._failures.items() if one in self._used_elsewhere}
        for snapshot_id, remote in self._used_elsewhere.items():
            failure = self._failures.get(snapshot_id)
            is_time = failure is None or failure.backoff.is_due(now)
            is_there = self._local.open_snapshots.get(snapshot_id) is not None or self._is_coming_as_current(
                snapshot_id
            )
            if is_time and not is_there and snapshot_id not in self._fetch_tasks:
                task = self._fetch_tasks[snapshot_id] = asyncio.create_task(self._fetch_snapshot(snapshot_id, remote))
                task.add_done_callback(lambda _, one=snapshot_id: self._on_fetch_end(one))  # type: ignore[misc]

    def _read_elsewhere(self) -> dict[str, _RemoteSnapshot]:
        """Return the snapshots that other nodes read, except for current ones and those of unknown datasets."""
        catalog, found = self._local.catalog, dict[str, _RemoteSnapshot]()
        current = {one.record.snapshots[0].id for one in catalog if one.record.snapshots}
        for node, values in self._shared.remote_values(USED).items():
            for snapshot_id, value in values.items():
                if snapshot_id not in current and self._is_known(value):
                    found.setdefault(snapshot_id, _RemoteSnapshot(value)).nodes.append(node)
        return found

    def _is_known(self, value: UsedSnapshot) -> bool:
        """Return whether the snapshot's dataset is here, or was removed from the cluster."""
        catalog = self._local.catalog
        if catalog.find_added(_dataset_record(value)) is not None:
            return True
        return bool(value.url) and catalog.removals.is_removed(value.dataset, value.added)

    def _split_at_limit(
        self, found: dict[str, _RemoteSnapshot]
    ) -> tuple[dict[str, _RemoteSnapshot], dict[str, _RemoteSnapshot]]:
        """Split into snapshots to keep, those with the most reading nodes, and the others."""
        order = sorted(found, key=lambda one: (-len(found[one].nodes), one))
        return {one: found[one] for one in order[:MAX_KEPT]}, {one: found[one] for one in order[MAX_KEPT:]}

    async def _fetch_snapshot(self, snapshot_id: str, remote: _RemoteSnapshot) -> None:
        try:
            await self._fetch_and_keep(snapshot_id, remote)
            self._failures.pop(snapshot_id, None)
        except _NoLongerUsed:
            pass  # it is checked again when wanted again
        except Busy:
            failure = self._failures[snapshot_id] = _Failure("the dataset is being changed")
            failure.backoff.note_failure(time.monotonic())
        except CachefsError as error:
            self._note_failure(snapshot_id, remote, str(error))
        except Exception as error:
            self._note_failure(snapshot_id, remote, "internal error; see the daemon's log")
            self._local.errors.add("datasets", f"internal error with snapshot {snapshot_id} ({error!r})", bug=error)

    async def _fetch_and_keep(self, snapshot_id: str, remote: _RemoteSnapshot) -> None:
        """Fetch and keep a snapshot. Raises CachefsError."""
        open_snapshots, value = self._local.open_snapshots, remote.value
        if value.block_size > open_snapshots.block_size:
            raise CachefsError(
                f"it has blocks of {format_size(value.block_size)}, and daemon.block_size is "
                f"{format_size(open_snapshots.block_size)} here"
            )
        try:
            with open_snapshots.receive_file() as path:
                most = partial(self._reserve, snapshot_id, value)
                await self._files.fetch_older(snapshot_id, remote.nodes, path, most)
                dataset = await self._local.catalog.keep_older_snapshot(snapshot_id, _dataset_record(value), path)
        finally:
            self._reserved.pop(snapshot_id, None)
        if self._local.catalog.find(value.dataset) is dataset:
            await self._local.changes.follow_limits(dataset)
        log.info("snapshot %s of dataset %s is kept here, as another node reads it", snapshot_id, value.dataset)

    def _reserve(self, snapshot_id: str, value: UsedSnapshot) -> int:
        """Reserve bytes for the snapshot's file until it is kept, and return them. Call when its turn comes, possibly
        hours after another node has published it. Raises CachefsError."""
        is_there = self._local.open_snapshots.get(snapshot_id) is not None or self._is_coming_as_current(snapshot_id)
        if is_there or snapshot_id not in self._used_elsewhere:
            raise _NoLongerUsed(f"snapshot {snapshot_id} is no longer wanted")
        self._local.catalog.check_idle(value.dataset)  # otherwise it could not be kept after its transfer
        room = MAX_BYTES - self._local.catalog.kept_bytes() - sum(self._reserved.values())
        if value.file_size > room:
            raise CachefsError(
                f"its file has {format_size(value.file_size)}, and older snapshots may take {format_size(MAX_BYTES)}"
            )
        most = self._reserved[snapshot_id] = min(room, _MAX_SIZE_RATIO * value.file_size)
        return most

    def _note_failure(self, snapshot_id: str, remote: _RemoteSnapshot, why: str) -> None:
        before = self._failures.get(snapshot_id)
        failure = self._failures[snapshot_id] = _Failure(why) if before is None else replace(before, reason=why)
        failure.backoff.note_failure(time.monotonic())
        if before is None or before.reason != why:
            text = f"snapshot {snapshot_id[:12]}, which {self._readers_text(remote.nodes)}, cannot be fetched: {why}"
            self._local.errors.add(f"dataset {remote.value.dataset}", text)

    def _on_fetch_end(self, snapshot_id: str) -> None:
        self._fetch_tasks.pop(snapshot_id, None)
        self._wakeup.set()

    def _readers_text(self, nodes: list[str]) -> str:
        names = sorted(record.name for node in nodes if (record := self._shared.node_record(node)) is not None)
        if not names:
            return "another node reads"
        return f"{format_names(names, _MAX_NAMED_NODES)} {'reads' if len(names) == 1 else 'read'}"


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


def _dataset_record(value: UsedSnapshot) -> DatasetRecord:
    return DatasetRecord(value.dataset, value.url, value.options, [], added=value.added, named=value.named)
