"""The catalog of datasets of this node: their names, origins and snapshots.

Each dataset keeps its current snapshot, the one before it, and any snapshot that a mount or a job of this node or of
another one still reads. A removed dataset is kept, but not shown, as long as another node reads one of its snapshots.
"""

import asyncio
import contextlib
import dataclasses
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cachefs import snapshot as snapshots
from cachefs.errors import AlreadyExists, Busy, CachefsError, ConfigError, NotFound, SnapshotDamaged, remove_secrets
from cachefs.messages import (
    DatasetAddRequest,
    DatasetView,
    EndpointStatus,
    ListingPhase,
    ListingProgress,
    OriginOptions,
)
from cachefs.snapshot import Snapshot
from cachefs.snapshot_diff import compare_snapshots
from cachefs_daemon.datasets import origin_access, records
from cachefs_daemon.datasets.listing import ListingRequest, build_snapshot
from cachefs_daemon.datasets.listing_journal import journal_path, remove_stale
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.origin_access import OriginAccess
from cachefs_daemon.datasets.origin_upkeep import OriginUpkeep
from cachefs_daemon.datasets.records import DatasetRecord, Registry, RemovedRecord, SnapshotRecord
from cachefs_daemon.datasets.stamps import NO_STAMP, UNSHARED, ChangeStamp, Removals, SharedChanges, is_floor
from cachefs_daemon.origin.base import Origin, OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint, with_distinct_names
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.unusable import UnusableOrigin
from cachefs_daemon.runtime import boot_clock
from cachefs_daemon.runtime.shielded import shielded
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# `all` is the mount SPEC for every dataset of the node.
_RESERVED: Final = frozenset({"all"})
# Snapshots that each dataset keeps, even unused.
KEPT_GENERATIONS: Final = 2
# The time of replacement of an old snapshot from another node: before any mount of this node started.
_REPLACED_LONG_AGO: Final = 0.001
# Most seconds that a user's change waits for one from another node, which puts a snapshot in place.
ADOPTION_WAIT_SECONDS: Final = 10.0
# Snapshots for which the dataset's name is cached.
_MAX_CACHED_NAMES: Final = 4096


@dataclass(slots=True)
class Dataset:
    """A dataset of this node."""

    # The dataset as it is kept on disk.
    record: DatasetRecord
    # The open origin of the dataset.
    origin: Origin
    # The current snapshot; None where that is damaged.
    current: Snapshot | None


class Catalog:
    """All datasets of the node. Used on the event loop; their snapshots may be used in any thread."""

    def __init__(
        self,
        state_dir: Path,
        open_snapshots: OpenSnapshots,
        settings: OriginSettings,
        threads: Threads,
        shared: SharedChanges = UNSHARED,
    ) -> None:
        """open_snapshots: receives the snapshots of all datasets. shared: stamps each change, and learns of it. Raises
        CachefsError where the registry cannot be read."""
        self.shared = shared
        self._state_dir = state_dir
        self._open_snapshots = open_snapshots
        self._settings = settings
        self._threads = threads
        self._datasets: dict[str, Dataset] = {}  # by name
        self._removed_datasets: list[Dataset] = []  # removed, with snapshots that other nodes read
        self._upkeep = OriginUpkeep()
        # Names of datasets that are being listed or removed, or taken over from another node; the latter with an event
        # that is set at the end.
        self._changing: dict[str, asyncio.Event | None] = {}
        self._saving = threading.Lock()
        self._names: dict[str, str] = {}  # by id of a snapshot: see `dataset_of`
        known = records.load(state_dir)
        self.removals = Removals({one.name: one.added for one in known.removed}, known.forgotten, known.spared)
        for record in known.datasets:
            self._load_dataset(record)
        self._removed_datasets = [
            Dataset(record, self._open_origin_or_unusable(record), None) for record in known.departed
        ]
        # Older snapshots are opened last: where descriptors are short, each dataset then has its current snapshot.
        for dataset in self:
            for old in dataset.record.snapshots[1:]:
                self._open_snapshot_or_none(dataset.record.name, old, dataset.origin)
        for dataset in self._removed_datasets:
            for old in dataset.record.snapshots:
                self._open_snapshot_or_none(dataset.record.name, old, dataset.origin)
        self._remove_unused()

    def __iter__(self) -> Iterator[Dataset]:
        return iter(list(self._datasets.values()))

    def __len__(self) -> int:
        return len(self._datasets)

    def find(self, name: str) -> Dataset | None:
        return self._datasets.get(name)

    def get(self, name: str) -> Dataset:
        """Return the dataset of that name. Raises NotFound."""
        dataset = self._datasets.get(name)
        if dataset is None:
            known = ", ".join(sorted(self._datasets)) or "none yet"
            if "/" in name:
                raise NotFound(
                    f"{name!r} is a path, not the name of a dataset (known: {known}); `cachectl mounts` shows which "
                    "dataset is mounted there"
                )
            raise NotFound(f"no dataset named {name!r} (known: {known}); add it with `cachectl dataset add {name} URL`")
        return dataset

    def snapshot(self, name: str) -> Snapshot:
        """Return the current snapshot of a dataset. Raises NotFound, SnapshotDamaged."""
        dataset = self.get(name)
        if dataset.current is None:
            raise SnapshotDamaged(f"the snapshot of {name} is lost; run `cachectl dataset refresh {name}`")
        return dataset.current

    def is_replaced(self, snapshot: str) -> bool:
        """Return whether *snapshot* is an older one of a dataset, and the current one of none."""
        known = [[one.id for one in dataset.record.snapshots] for dataset in self]
        return any(snapshot in ids[1:] for ids in known) and all(snapshot not in ids[:1] for ids in known)

    def generations(self, dataset: Dataset) -> list[Snapshot]:
        """Return all snapshots of the dataset that are still on this node, newest first."""
        snapshots = (self._open_snapshots.get(known.id) for known in dataset.record.snapshots)
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def view(self, dataset: Dataset) -> DatasetView:
        """Return the public description of the dataset. Its snapshot and path are empty where the snapshot is lost."""
        record, snapshot = dataset.record, dataset.current
        return DatasetView(
            name=record.name,
            url=remove_secrets(record.url),
            snapshot=snapshot.id if snapshot else "",
            path=str(self._open_snapshots.path(snapshot.id)) if snapshot else "",
            files=snapshot.files if snapshot else 0,
            directories=snapshot.directories if snapshot else 0,
            bytes=snapshot.bytes if snapshot else 0,
            created_ns=snapshot.created_ns if snapshot else 0,
            problems=snapshot.problem_count if snapshot else 0,
            archived=snapshot.archived if snapshot else 0,
            share=record.share,
            ttl=record.ttl,
            most=record.most,
            others=[known.id for known in record.snapshots if snapshot is None or known.id != snapshot.id],
            reached=origin_access.describe_options(record.options),
        )

    def mountable(self) -> list[DatasetView]:
        """Return the datasets that a mount can show."""
        return [self.view(dataset) for dataset in self if dataset.current is not None]

    def check_new(self, name: str, url: str) -> None:
        """Raise ConfigError where *name* cannot name a dataset, AlreadyExists where it names one."""
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ConfigError(
                f"{name!r} cannot name a dataset: use 1 to 64 of A-Z a-z 0-9 . _ - "
                "with neither dot nor dash in front, and not `all`"
            )
        known = self._datasets.get(name)
        if known is not None:
            raise AlreadyExists(_name_taken_text(known.record, url))

    async def add(self, request: DatasetAddRequest) -> AsyncGenerator[ListingProgress, None]:
        """List a new dataset. Yields progress, and last a message with the dataset. Raises AlreadyExists, Busy,
        ConfigError, and the errors of the origin."""
        name = request.name
        self.check_new(name, request.url)
        origin_access.check_lengths(request.url, request.options)
        origin = open_origin(request.url, request.options, self._settings)
        resumed = 0
        stamp = self.shared.stamp()
        added = [stamp] if stamp != NO_STAMP else []
        dataset = Dataset(DatasetRecord(name, origin.url, request.options, [], added=added), origin, None)
        try:
            with self._changing_name(name):
                async with contextlib.aclosing(self._list_origin(dataset)) as steps:
                    async for progress in steps:
                        resumed = progress.resumed
                        yield progress
        finally:
            if name not in self._datasets:
                await origin.close()
        log.info("dataset %s added: %d files of %s", name, self.snapshot(name).files, request.url)
        yield self._last_progress(dataset, resumed)

    async def refresh(self, name: str) -> AsyncGenerator[ListingProgress, None]:
        """List a dataset again. Yields progress, and last a message with the dataset and the changes. Raises NotFound,
        Busy, and the errors of the origin."""
        dataset = self.get(name)
        before = dataset.current
        resumed = 0
        with self._changing_name(name):
            async with contextlib.aclosing(self._list_origin(dataset)) as steps:
                async for progress in steps:
                    resumed = progress.resumed
                    yield progress
        last = self._last_progress(dataset, resumed)
        if before is not None and before.is_replaced():
            # The listing has written the same snapshot again, or its file was damaged meanwhile: see `check_files`.
            before = dataset.current if dataset.current is not None and dataset.current.id == before.id else None
        if before is not None and dataset.current is not None:
            diff = await self._threads.background(compare_snapshots, before, dataset.current)
            last = msgspec.structs.replace(last, diff=diff)
            log.info(
                "dataset %s refreshed: %d files added, %d changed, %d removed",
                name, diff.added, diff.changed, diff.removed,
            )  # fmt: skip
        yield last

    async def remove(self, name: str, is_read_elsewhere: Callable[[str], bool] = lambda _: False) -> Dataset:
        """Forget the dataset and its snapshots, except those with an id for which *is_read_elsewhere* returns true; its
        blocks stay. Raises NotFound, Busy."""
        dataset = self.get(name)
        with self._changing_name(name):
            added = {*dataset.record.added, *self.shared.stamps_elsewhere(name)}
            removals, departed = self.removals, self._removed_datasets
            del self._datasets[name]
            if read := [snapshot for snapshot in dataset.record.snapshots if is_read_elsewhere(snapshot.id)]:
                record = msgspec.structs.replace(dataset.record, snapshots=read)
                self._removed_datasets = [*departed, Dataset(record, dataset.origin, None)]
            if self.shared.stamp() != NO_STAMP:  # outside of a cluster it concerns this node only
                self.removals = removals.with_removal(name, added, self.shared.additions_elsewhere)
            else:
                self.removals = removals.with_spared(added)
            try:
                await self._save()
            except CachefsError:
                self._datasets[name], self.removals, self._removed_datasets = dataset, removals, departed
                raise
        log.info("dataset %s removed", name)
        self.shared.note_change(name)
        return dataset

    async def set_pins(self, name: str, pins: list[bytes]) -> None:
        """Pin paths relative to the dataset's root. Raises NotFound, CachefsError."""
        await self._change(self.get(name), pins=pins)

    async def set_limits(self, name: str, *, share: float, most: int, ttl: float) -> None:
        """Set the limits of DatasetRecord. Raises NotFound, CachefsError."""
        await self._change(self.get(name), share=share, most=most, ttl=ttl, limited=self.shared.stamp())
        self.shared.note_change(name)

    def open_origin_of(self, name: str, options: OriginOptions) -> Origin:
        """Return an origin of the dataset with other options, which the caller owns. Raises NotFound, ConfigError."""
        return open_origin(self.get(name).record.url, options, self._settings)

    async def set_origin(self, name: str, access: OriginAccess, origin: Origin) -> None:
        """Use another *origin* and other options for a dataset; reads that wait for the old origin take the new one.
        Raises NotFound, CachefsError; then the caller still owns *origin*."""
        dataset = self.get(name)
        await self._change(dataset, options=access.options, named=access.named, reached=access.reached)
        self._upkeep.retire(dataset.origin)
        dataset.origin = origin
        self._remove_unused()
        log.info(
            "dataset %s: new options of its origin: %s",
            name,
            origin_access.describe_options(access.options) or "defaults",
        )
        self.shared.note_change(name)

    async def _change(self, dataset: Dataset, **fields: object) -> None:
        before = dataset.record
        dataset.record = msgspec.structs.replace(before, **fields)
        try:
            await self._save()
        except CachefsError:
            dataset.record = before
            raise

    # --- in a cluster -----------------------------------------------------------------------------------------------

    async def note_removed(self, name: str, added: list[ChangeStamp]) -> None:
        """Record that datasets of that name, added then, were removed on another node. Raises CachefsError."""
        self.removals = self.removals.with_removal(name, added, self.shared.additions_elsewhere)
        await self._save()

    def find_added(self, record: DatasetRecord) -> Dataset | None:
        """Return the dataset of the same adding as *record*, also where it was removed since."""
        known = self._datasets.get(record.name)
        alike = [
            *([known] if known is not None else []),
            *(dataset for dataset in self._removed_datasets if dataset.record.name == record.name),
        ]
        added = {stamp for stamp in record.added if not is_floor(stamp)}
        return next((one for one in alike if not added.isdisjoint(one.record.added)), None)

    async def keep_older_snapshot(self, snapshot_id: str, record: DatasetRecord, received: Path) -> Dataset:
        """Keep an older snapshot of a dataset, which other nodes read. received: the file of the snapshot. Raises Busy
        while the dataset is listed or removed, CachefsError."""
        with self._changing_name(record.name, ends=asyncio.Event()):
            known = self.find_added(record)
            dataset = known or Dataset(
                msgspec.structs.replace(record, snapshots=[]),
                open_origin(record.url, record.options, self._settings),
                None,
            )
            try:
                await self._threads.background(self._open_snapshots.install_file, received, snapshot_id)
                self._open_snapshots.open_snapshot(snapshot_id, dataset.origin)
                if known is None:
                    self._removed_datasets.append(dataset)
                before = dataset.record.snapshots
                if all(one.id != snapshot_id for one in before):
                    old = SnapshotRecord(snapshot_id, _REPLACED_LONG_AGO, boot_clock.now().boot)
                    dataset.record = msgspec.structs.replace(dataset.record, snapshots=[*before, old])
                await self._save()
            except BaseException:
                if known is None:
                    self._removed_datasets = [one for one in self._removed_datasets if one is not dataset]
                    await dataset.origin.close()
                raise
        return dataset

    def is_origin_used(self, origin: Origin) -> bool:
        """Return whether *origin* is in use by a dataset, or by kept snapshots of a removed one."""
        return any(one.origin is origin for one in [*self, *self._removed_datasets])

    def kept_bytes(self) -> int:
        """Return the bytes of the files of all snapshots that are kept only for their readers."""
        older = (one.record.snapshots[KEPT_GENERATIONS:] for one in self)
        gone = (dataset.record.snapshots for dataset in self._removed_datasets)
        ids = {record.id for snapshots in (*older, *gone) for record in snapshots}
        return sum(self._open_snapshots.file_size(one) for one in ids)

    def read_snapshots(self, is_read: Callable[[str], bool]) -> list[Snapshot]:
        """Return the current snapshots of all datasets, and older ones for whose id *is_read* returns true."""
        found = {one.current.id: one.current for one in self if one.current is not None}
        for dataset in [*self, *self._removed_datasets]:
            for record in dataset.record.snapshots:
                snapshot = self._open_snapshots.get(record.id)
                if snapshot is not None and record.id not in found and is_read(record.id):
                    found[record.id] = snapshot
        return list(found.values())

    async def check_origin(self, record: DatasetRecord) -> None:
        """Raise CachefsError where this node cannot have such a dataset."""
        if record.name not in self._datasets:
            await open_origin(record.url, record.options, self._settings).close()

    async def stamp_all(self) -> None:
        """Stamp changes that were made outside of a cluster with the present time. Raises CachefsError."""
        for dataset in self:
            record = dataset.record
            if not record.added or record.listed == NO_STAMP:
                stamp = self.shared.stamp()
                dataset.record = msgspec.structs.replace(
                    record, added=record.added or [stamp], listed=stamp, limited=stamp
                )
        await self._save()

    async def restamp(self, name: str, **fields: object) -> None:
        """Change only stamps and limits of a dataset. Raises NotFound, CachefsError."""
        await self._change(self.get(name), **fields)

    async def adopt_dataset(self, remote: DatasetRecord, received: Path | None) -> Dataset:
        """Take over a dataset that another node has listed, with the only snapshot that *remote* names. The dataset may
        exist here with another snapshot. received: the file of the snapshot; None where it is in its place. Raises Busy
        while the dataset is listed or removed, CachefsError."""
        with self._changing_name(remote.name, ends=asyncio.Event()):
            return await self._adopt_remote(remote, received)

    async def _adopt_remote(self, remote: DatasetRecord, received: Path | None) -> Dataset:
        known = self._datasets.get(remote.name)
        origin = known.origin if known is not None else open_origin(remote.url, remote.options, self._settings)
        (current,) = remote.snapshots
        before = known.record if known is not None else msgspec.structs.replace(remote, snapshots=[])
        record = msgspec.structs.replace(
            before,
            added=remote.added,
            listed=remote.listed,
            share=remote.share,
            ttl=remote.ttl,
            most=remote.most,
            limited=remote.limited,
        )
        dataset, was = known or Dataset(record, origin, None), before
        dataset.record = record
        try:
            if received is not None:
                await self._threads.background(self._open_snapshots.install_file, received, current.id)
            await self._make_current(dataset, self._open_snapshots.path(current.id), remote.listed)
        except BaseException:
            if known is None:
                await origin.close()
            else:
                dataset.record = was
            raise
        return dataset

    async def forget_unused(self, in_use: Callable[[SnapshotRecord], bool]) -> None:
        """Forget unused snapshots that are older than the last KEPT_GENERATIONS, and listings that were interrupted a
        while ago.

        in_use: returns whether a snapshot that is no longer current may be in use.
        """
        await self._threads.background(remove_stale, self._state_dir)
        await self._upkeep.close_retired()
        changed = False
        for dataset in self:
            old = dataset.record.snapshots[KEPT_GENERATIONS:]
            kept = [snapshot for snapshot in old if in_use(snapshot)]
            if kept != old:
                snapshots_left = dataset.record.snapshots[:KEPT_GENERATIONS] + kept
                dataset.record = msgspec.structs.replace(dataset.record, snapshots=snapshots_left)
                changed = True
        for dataset in list(self._removed_datasets):
            if dataset.record.name in self._changing:
                # `keep_older_snapshot` may be putting a snapshot in its place that the record does not name yet
                continue
            kept = [snapshot for snapshot in dataset.record.snapshots if in_use(snapshot)]
            if kept != dataset.record.snapshots:
                dataset.record = msgspec.structs.replace(dataset.record, snapshots=kept)
                changed = True
            if not kept:
                self._removed_datasets.remove(dataset)
                self._upkeep.retire(dataset.origin)
        if changed:
            await self._save()
            self._remove_unused()

    async def check_files(self) -> list[str]:
        """Reopen snapshot files that have changed since they were opened, and drop damaged ones.

        Call every few seconds: see `Snapshot.is_replaced`. Returns the errors. A damaged snapshot that other nodes have
        is then fetched from one of them.
        """
        replaced = await self._threads.upkeep(self._open_snapshots.find_replaced)
        if not replaced:
            return []
        problems = self._open_snapshots.reopen_replaced(replaced)
        datasets = [dataset for dataset in self if dataset.current is not None]
        self._update_current()
        for dataset in datasets:
            if dataset.current is None:
                self.shared.note_change(dataset.record.name)
        return problems

    def _update_current(self) -> None:
        """Update each dataset's current snapshot. Several datasets may have the same one."""
        for dataset in self:
            if dataset.current is not None:
                dataset.current = self._open_snapshots.get(dataset.current.id)

    def dataset_of(self, snapshot: str) -> str:
        """Return the name of a dataset that has the snapshot with that id; "" where none has it."""
        known = self._datasets.get(self._names.get(snapshot, ""))
        if known is None or all(one.id != snapshot for one in known.record.snapshots):
            datasets = [*self, *self._removed_datasets]
            found = (one.record.name for one in datasets if any(each.id == snapshot for each in one.record.snapshots))
            if len(self._names) >= _MAX_CACHED_NAMES:
                self._names.clear()
            self._names[snapshot] = next(found, "")
        return self._names[snapshot]

    def endpoint_of(self, snapshot: str) -> Endpoint | None:
        """Return the server of the dataset that has the snapshot with that id; None where no present dataset has it."""
        known = self._datasets.get(self.dataset_of(snapshot))
        return known.origin.endpoint if known is not None else None

    def endpoints(self) -> list[EndpointStatus]:
        """Return the status of the servers of all present datasets."""
        found = {id(dataset.origin.endpoint): dataset for dataset in self}
        return with_distinct_names([(one.origin.endpoint.status(), one.record.options) for one in found.values()])

    def prepare_origins(self, is_shown: Callable[[str], bool]) -> None:
        """Open, ahead of their first reads, the origins of the datasets for whose names *is_shown* returns true."""
        self._upkeep.prepare(dataset.origin for dataset in self if is_shown(dataset.record.name))

    async def close(self) -> None:
        """Close all origins."""
        await self._upkeep.close()
        for dataset in [*self, *self._removed_datasets]:
            await dataset.origin.close()

    async def _list_origin(self, dataset: Dataset) -> AsyncGenerator[ListingProgress, None]:
        """List the dataset's origin, and make the result its current snapshot."""
        record = dataset.record
        expected = dataset.current.files if dataset.current is not None else 0
        request = ListingRequest(
            url=record.url,
            block_size=self._open_snapshots.block_size,
            directory=str(self._open_snapshots.directory),
            options=record.options,
            named=record.named,
            settings=dataclasses.replace(self._settings, scratch=str(self._open_snapshots.directory)),
            journal=str(journal_path(self._state_dir, record.url, self._open_snapshots.block_size, record.options)),
        )
        async with contextlib.aclosing(build_snapshot(request)) as steps:
            async for step in steps:
                if isinstance(step, ListingProgress):
                    yield msgspec.structs.replace(step, expected=expected)
                else:
                    await shielded(self._make_current(dataset, step, self.shared.stamp()))

    async def _make_current(self, dataset: Dataset, path: Path, listed: ChangeStamp) -> None:
        """Make the snapshot at *path*, which was made at *listed*, the current one of *dataset*, which may be new."""
        record = dataset.record
        before = record.snapshots
        fresh = path.stem
        if before and before[0].id == fresh and dataset.current is not None:
            self._open_snapshots.open_snapshot(fresh, dataset.origin)  # the file at *path* is another one than before
            self._update_current()
            await self._save()
            return
        moment = boot_clock.now()
        retired = [SnapshotRecord(before[0].id, moment.seconds, moment.boot), *before[1:]] if before else []
        kept = [SnapshotRecord(fresh), *(snapshot for snapshot in retired if snapshot.id != fresh)]
        snapshot = self._open_snapshots.open_snapshot(fresh, dataset.origin)
        was_current = dataset.current
        dataset.record = msgspec.structs.replace(record, snapshots=kept, listed=listed)
        dataset.current = snapshot
        is_new = record.name not in self._datasets
        self._datasets[record.name] = dataset
        self._update_current()
        try:
            await self._save()
        except CachefsError:
            dataset.record, dataset.current = record, was_current
            if is_new:
                del self._datasets[record.name]
            raise
        self.shared.note_change(record.name)

    def _last_progress(self, dataset: Dataset, resumed: int) -> ListingProgress:
        view = self.view(dataset)
        return ListingProgress(
            phase=ListingPhase.BUILDING, objects=view.files, bytes=view.bytes, resumed=resumed, dataset=view
        )

    def _load_dataset(self, record: DatasetRecord) -> None:
        """Load a dataset of an earlier run. Its errors are logged and concern no other dataset."""
        origin = self._open_origin_or_unusable(record)
        current = self._open_snapshot_or_none(record.name, record.snapshots[0], origin) if record.snapshots else None
        self._datasets[record.name] = Dataset(record, origin, current)

    def _open_origin_or_unusable(self, record: DatasetRecord) -> Origin:
        try:
            return open_origin(record.url, record.options, self._settings)
        except CachefsError as error:
            log.error("dataset %s: %s", record.name, error)
            return UnusableOrigin(record.url, error)

    def _open_snapshot_or_none(self, name: str, record: SnapshotRecord, origin: Origin) -> Snapshot | None:
        try:
            snapshots.verify(self._open_snapshots.path(record.id))
            return self._open_snapshots.open_snapshot(record.id, origin)
        except CachefsError as error:
            log.error("dataset %s: %s", name, error)
        except OSError as error:
            log.error("dataset %s: snapshot %s cannot be read: %s", name, record.id, error.strerror)
        return None

    def _remove_unused(self) -> None:
        """Release the snapshots to which no dataset refers, and remove their files and those of broken listings.

        No file is removed while a listing is in progress: no dataset refers to its file yet.
        """
        origins: dict[str, list[Origin]] = {}
        for dataset in [*self, *self._removed_datasets]:
            for record in dataset.record.snapshots:
                origins.setdefault(record.id, []).append(dataset.origin)
        self._open_snapshots.keep_only(origins)
        if not self._changing:
            self._open_snapshots.remove_files(origins)

    async def _save(self) -> None:
        await self._threads.background(self._save_now)

    def _save_now(self) -> None:
        """Write the registry, in a thread. Saves run one at a time, and each writes the state at its start, so the last
        one never writes an older state."""
        with self._saving:
            removals = self.removals
            registry = Registry(
                [dataset.record for dataset in self],
                [RemovedRecord(name, added) for name, added in removals.names.items()],
                removals.forgotten,
                removals.spared,
                [dataset.record for dataset in self._removed_datasets],
            )
            records.save(self._state_dir, registry)

    def check_idle(self, name: str) -> None:
        """Raise Busy while the dataset is listed or removed."""
        if name in self._changing:
            raise Busy(f"dataset {name} is being listed or removed; try again afterwards")

    async def wait_until_adopted(self, name: str) -> None:
        """Wait until the taking over of a dataset from another node, which no user has begun, is on this node's disk.

        Call it first where a user changes the dataset, since the dataset has another snapshot afterwards.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPTION_WAIT_SECONDS):
                while ends := self._changing.get(name):
                    await ends.wait()

    @contextlib.contextmanager
    def _changing_name(self, name: str, *, ends: asyncio.Event | None = None) -> Iterator[None]:
        self.check_idle(name)
        self._changing[name] = ends
        try:
            yield
        finally:
            del self._changing[name]
            if ends is not None:
                ends.set()
            self._remove_unused()


def _name_taken_text(record: DatasetRecord, url: str) -> str:
    """Return the reason for which a dataset of *url* cannot be added under a name that is in use."""
    if record.url == url.rstrip("/"):
        return f"dataset {record.name} is {record.url} already; `cachectl dataset refresh {record.name}` lists it again"
    return (
        f"dataset {record.name} is taken by {record.url}; choose another name, "
        f"or remove it first with `cachectl dataset rm {record.name}`"
    )
