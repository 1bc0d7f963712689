"""Which snapshots the mounts and jobs of the cluster read, and keeping them on this node as long as any node does.

A mount stays at the snapshot that it began with, and so does its job, however often the dataset is refreshed meanwhile.
The blocks of that snapshot have homes on all nodes. So each node says which snapshots are read on it, and the others
keep these and bring those that they lack, until no node reads them any more: also a node that joins later, and after
the dataset was removed. What other nodes can make this one keep is bounded in number and bytes, and only snapshots of
datasets are kept that are in the cluster or were.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec

from cachefs.counts import shown_names
from cachefs.errors import Busy, CachefsError
from cachefs.messages import MountElsewhere
from cachefs.sizes import format_size
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.held_snapshots import HeldSnapshots
from cachefs_daemon.datasets.records import DatasetRecord
from cachefs_daemon.runtime.backoff import Backoff
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.sharing.sections import MOUNTED, USED, MountedDataset, UsedSnapshot
from cachefs_daemon.sharing.snapshot_files import SnapshotFiles
from cachefs_daemon.sharing.state import SharedState

log = logging.getLogger(__name__)

# Seconds for which news is gathered; between two looks at what is read here and elsewhere.
GATHERED: Final = 0.05
LOOK_SECONDS: Final = 2.0
# Seconds for which a snapshot is kept after the last node has said that it reads it: the node may come back, or this
# one has just started.
GRACE_SECONDS: Final = 600.0
# Snapshots that are kept for other nodes, and bytes of those that are beside the generations that each dataset has.
MOST_KEPT: Final = 64
MOST_BYTES: Final = 32 << 30
# The file of one snapshot may be so many times as large on one node as on another: they have listed it apart.
_UNLIKE: Final = 2
# Seconds until a snapshot is asked for again that could not be had: doubled each time, from the first to the second.
FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 60.0
# Nodes that a line names, and lines that are shown.
_MOST_NAMED: Final = 3
_MOST_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """What a mount, a job or a warm-up of this node reads of a dataset."""

    dataset: str
    # Ids of snapshots.
    snapshots: Sequence[str]
    # Of the mount; and whether it shows the same snapshot after a refresh, though it was not told which one to show.
    mountpoint: str = ""
    stays: bool = False


@dataclass(frozen=True, slots=True)
class ReadHere:
    """What this node's datasets are made of, and what is read of them here."""

    catalog: Catalog
    held: HeldSnapshots
    changes: DatasetChanges
    errors: ErrorLog
    # Where a dataset is mounted on this node; empty where it is not mounted.
    mounted: Callable[[str], str]
    # What mounts and jobs of this node read now.
    reading: Callable[[], Iterable[Reading]]


@dataclass(slots=True)
class _Wanted:
    """A snapshot that other nodes read and that is current nowhere here."""

    value: UsedSnapshot
    # Ids of the nodes that read it.
    nodes: list[str] = field(default_factory=list)


class _NotWanted(CachefsError):
    """The snapshot is not to be fetched any more."""


@dataclass(slots=True)
class _Failure:
    """Why a snapshot could not be had."""

    why: str
    # In monotonic seconds.
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE, LAST_PAUSE))


class UsedSnapshots:
    """Used on the event loop."""

    def __init__(
        self, shared: SharedState, files: SnapshotFiles, here: ReadHere, has_otherwise: Callable[[str], bool]
    ) -> None:
        """has_otherwise: whether a snapshot is on its way here as the current one of its dataset."""
        self._shared = shared
        self._files = files
        self._here = here
        self._has_otherwise = has_otherwise
        self._reserved: dict[str, int] = {}  # by snapshot that is being fetched: bytes that its file may take
        self._wake = asyncio.Event()
        self._wanted: dict[str, _Wanted] = {}  # by snapshot: those that are kept, or should be
        self._beyond: dict[str, _Wanted] = {}  # those that are too many
        self._until: dict[str, float] = {}  # by snapshot: monotonic seconds until which it is kept at least
        self._bringing: dict[str, asyncio.Task[None]] = {}  # by snapshot
        self._failures: dict[str, _Failure] = {}  # by snapshot

    # --- what others ask ----------------------------------------------------------------------------------------------

    def is_used(self, snapshot_id: str) -> bool:
        """Return whether another node reads the snapshot, or has read it a moment ago."""
        return time.monotonic() < self._until.get(snapshot_id, 0.0)

    def keep_if_read(self, snapshot_id: str) -> bool:
        """Return whether another node says that it reads the snapshot, also a current one. Then it is kept as others
        are."""
        if not any(snapshot_id in values for values in self._shared.values(USED).values()):
            return False
        self._until[snapshot_id] = time.monotonic() + GRACE_SECONDS
        return True

    def is_read(self, snapshot_id: str) -> bool:
        """Return whether any node, this one included, reads the snapshot now."""
        return snapshot_id in self._wanted or self._shared.says(USED, snapshot_id)

    def is_coming(self, snapshot_id: str) -> bool:
        """Is the snapshot on its way here?"""
        return snapshot_id in self._bringing

    def is_fetched(self, snapshot_id: str) -> bool:
        """Return whether the file of the snapshot has had its turn and is being fetched."""
        return snapshot_id in self._reserved

    @property
    def is_behind(self) -> bool:
        """Is any snapshot on its way here?"""
        return bool(self._bringing)

    def problems(self) -> list[str]:
        """The snapshots that other nodes read and this one does not have, a line for each."""
        lines = []
        for snapshot_id, wanted in sorted([*self._wanted.items(), *self._beyond.items()]):
            if self._here.held.get(snapshot_id) is not None:
                continue
            failure = self._failures.get(snapshot_id)
            if snapshot_id in self._beyond:
                why = f"{MOST_KEPT} older snapshots are kept already; mount datasets anew where they are read"
            else:
                why = f"{failure.why}; it is tried again" if failure is not None else "it is on its way"
            lines.append(
                f"dataset {wanted.value.dataset}: snapshot {snapshot_id[:12]}, which {self._named(wanted.nodes)}, is "
                f"not on this node, so other nodes bring its blocks: {why}"
            )
        return lines[:_MOST_SHOWN] + ([f"{len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else [])

    def check_unused(self, name: str) -> None:
        """Raises Busy where another node has mounted the dataset."""
        for node, values in self._shared.values(MOUNTED).items():
            record, value = self._shared.node(node), values.get(name)
            if value is not None and record is not None:
                raise Busy(f"dataset {name} is mounted at {value.mountpoint} on node {record.name}; unmount that first")

    def mounts_behind(self, name: str, current: str) -> list[MountElsewhere]:
        """Mounts of other nodes that stay at another snapshot of the dataset than the *current* one."""
        return [
            MountElsewhere(node=record.name, mountpoint=value.mountpoint, snapshot=snapshot_id)
            for node, values in self._shared.values(USED).items()
            for snapshot_id, value in values.items()
            if value.dataset == name and value.mountpoint and snapshot_id != current
            and (record := self._shared.node(node)) is not None
        ]  # fmt: skip

    def look_soon(self) -> None:
        """Look at what is read once more: a mount or a job has begun or ended."""
        self._wake.set()

    # --- as long as the daemon runs -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Keep for a while whatever there is: no node has said yet what it reads."""
        until = time.monotonic() + GRACE_SECONDS
        self._until = {one.id: until for one in self._here.catalog.read_snapshots(lambda _: True)}
        self._shared.listen(USED, lambda node, name, value: self._wake.set())

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                self._look()
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                await asyncio.sleep(GATHERED)
        finally:
            tasks = list(self._bringing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        try:
            self._publish()
            self._follow()
        except Exception as error:
            self._here.errors.add("datasets", f"internal error with snapshots that are read ({error!r})", bug=error)

    # --- what this node says ------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        mounted: dict[str, MountedDataset] = {}
        used: dict[str, UsedSnapshot] = {}
        for one in self._here.reading():
            dataset, place = self._here.catalog.find(one.dataset), _printable(one.mountpoint)
            if dataset is None or not dataset.record.added:
                continue
            if place:
                mounted.setdefault(one.dataset, MountedDataset(place))
            for snapshot_id in one.snapshots:
                said = used.get(snapshot_id)
                if said is None or (one.stays and not said.mountpoint):
                    value = self._value(dataset.record, snapshot_id, place if one.stays else "")
                    used.update({snapshot_id: value} if value is not None else {})
        for name in set(self._shared.published(MOUNTED)) - set(mounted):
            self._shared.remove(MOUNTED, name)
        for name in set(self._shared.published(USED)) - set(used):
            self._shared.remove(USED, name)
        for name, mount in mounted.items():
            self._shared.publish(MOUNTED, name, mount)
        for name, value in list(used.items())[: USED.most]:
            self._shared.publish(USED, name, value)

    def _value(self, record: DatasetRecord, snapshot_id: str, mountpoint: str) -> UsedSnapshot | None:
        snapshot = self._here.held.get(snapshot_id)
        if snapshot is None:
            return None
        size = self._here.held.file_size(snapshot_id)
        value = UsedSnapshot(record.name, record.added, max(1, size), snapshot.block_size, mountpoint)
        if not self._here.catalog.removals.is_removed(record.name, record.added):
            return value
        return msgspec.structs.replace(value, url=record.url, options=record.options, named=record.named)

    # --- what others say ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Keep what other nodes read, and bring what is missing of it."""
        self._wanted, self._beyond = self._chosen(self._read_elsewhere())
        now = time.monotonic()
        self._until = {one: until for one, until in self._until.items() if until > now}
        self._until.update(dict.fromkeys(self._wanted, now + GRACE_SECONDS))
        self._failures = {one: failure for one, failure in self._failures.items() if one in self._wanted}
        for snapshot_id, wanted in self._wanted.items():
            failure = self._failures.get(snapshot_id)
            is_time = failure is None or failure.backoff.is_due(now)
            is_there = self._here.held.get(snapshot_id) is not None or self._has_otherwise(snapshot_id)
            if is_time and not is_there and snapshot_id not in self._bringing:
                task = self._bringing[snapshot_id] = asyncio.create_task(self._bring(snapshot_id, wanted))
                task.add_done_callback(lambda _, one=snapshot_id: self._brought(one))  # type: ignore[misc]

    def _read_elsewhere(self) -> dict[str, _Wanted]:
        """What other nodes read of datasets that are in the cluster or were, by snapshot; without current ones."""
        catalog, found = self._here.catalog, dict[str, _Wanted]()
        current = {one.record.snapshots[0].id for one in catalog if one.record.snapshots}
        for node, values in self._shared.values(USED).items():
            for snapshot_id, value in values.items():
                if snapshot_id not in current and self._is_known(value):
                    found.setdefault(snapshot_id, _Wanted(value)).nodes.append(node)
        return found

    def _is_known(self, value: UsedSnapshot) -> bool:
        """Is it of a dataset that is here, or that was removed from the cluster?"""
        catalog = self._here.catalog
        if catalog.find_added(_record(value)) is not None:
            return True
        return bool(value.url) and catalog.removals.is_removed(value.dataset, value.added)

    def _chosen(self, found: dict[str, _Wanted]) -> tuple[dict[str, _Wanted], dict[str, _Wanted]]:
        """Those that are kept: the ones that most nodes read; and the others."""
        order = sorted(found, key=lambda one: (-len(found[one].nodes), one))
        return {one: found[one] for one in order[:MOST_KEPT]}, {one: found[one] for one in order[MOST_KEPT:]}

    async def _bring(self, snapshot_id: str, wanted: _Wanted) -> None:
        try:
            await self._keep(snapshot_id, wanted)
            self._failures.pop(snapshot_id, None)
        except _NotWanted:
            pass  # it is looked at again where it is wanted again
        except Busy:
            failure = self._failures[snapshot_id] = _Failure("the dataset is being changed")
            failure.backoff.fail(time.monotonic())
        except CachefsError as error:
            self._note_failure(snapshot_id, wanted, str(error))
        except Exception as error:
            self._note_failure(snapshot_id, wanted, "internal error; see the daemon's log")
            self._here.errors.add("datasets", f"internal error with snapshot {snapshot_id} ({error!r})", bug=error)

    async def _keep(self, snapshot_id: str, wanted: _Wanted) -> None:
        """Raises CachefsError."""
        held, value = self._here.held, wanted.value
        if value.block_size > held.block_size:
            raise CachefsError(
                f"it has blocks of {format_size(value.block_size)}, and daemon.block_size is "
                f"{format_size(held.block_size)} here"
            )
        try:
            with held.receiving() as path:
                most = partial(self._reserve, snapshot_id, value)
                await self._files.fetch_older(snapshot_id, wanted.nodes, path, most)
                dataset = await self._here.catalog.keep(snapshot_id, _record(value), path)
        finally:
            self._reserved.pop(snapshot_id, None)
        if self._here.catalog.find(value.dataset) is dataset:
            await self._here.changes.follow_limits(dataset)
        log.info("snapshot %s of dataset %s is kept here, as another node reads it", snapshot_id, value.dataset)

    def _reserve(self, snapshot_id: str, value: UsedSnapshot) -> int:
        """Return the bytes that the file may have, its own until it is kept. To be called when its turn comes,
        which may be hours after another node has said that it reads it. Raises CachefsError."""
        is_there = self._here.held.get(snapshot_id) is not None or self._has_otherwise(snapshot_id)
        if is_there or snapshot_id not in self._wanted:
            raise _NotWanted(f"snapshot {snapshot_id} is not wanted any more")
        self._here.catalog.check_idle(value.dataset)  # else it could not be kept when it has come
        room = MOST_BYTES - self._here.catalog.kept_bytes() - sum(self._reserved.values())
        if value.file_size > room:
            raise CachefsError(
                f"its file has {format_size(value.file_size)}, and older snapshots may take {format_size(MOST_BYTES)}"
            )
        most = self._reserved[snapshot_id] = min(room, _UNLIKE * value.file_size)
        return most

    def _note_failure(self, snapshot_id: str, wanted: _Wanted, why: str) -> None:
        before = self._failures.get(snapshot_id)
        failure = self._failures[snapshot_id] = _Failure(why) if before is None else replace(before, why=why)
        failure.backoff.fail(time.monotonic())
        if before is None or before.why != why:
            text = f"snapshot {snapshot_id[:12]}, which {self._named(wanted.nodes)}, cannot be had: {why}"
            self._here.errors.add(f"dataset {wanted.value.dataset}", text)

    def _brought(self, snapshot_id: str) -> None:
        self._bringing.pop(snapshot_id, None)
        self._wake.set()

    def _named(self, nodes: list[str]) -> str:
        """Say that these nodes read a snapshot."""
        names = sorted(record.name for node in nodes if (record := self._shared.node(node)) is not None)
        if not names:
            return "another node reads"
        return f"{shown_names(names, _MOST_NAMED)} {'reads' if len(names) == 1 else 'read'}"


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


def _record(value: UsedSnapshot) -> DatasetRecord:
    return DatasetRecord(value.dataset, value.url, value.options, [], added=value.added, named=value.named)
