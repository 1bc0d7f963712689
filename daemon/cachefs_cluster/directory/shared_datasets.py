"""Shares datasets across the cluster: what is added, refreshed, limited or removed on one node takes effect on all.

Each dataset is published by one node, usually the one that changed it last; other nodes publish only datasets without a
publisher. So with 1,000 nodes and 1,000 datasets no node keeps a million records, and a change is not sent a million
times.
"""

import asyncio
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from cachefs.backoff import Backoff
from cachefs.errors import Busy, CachefsError
from cachefs.sizes import format_size
from cachefs_cluster.directory.dataset_merge import Resolution, includes, is_added, is_same, resolve
from cachefs_cluster.directory.used_snapshots import LocalDatasets
from cachefs_cluster.sharing.sections import DATASETS, SharedDataset
from cachefs_cluster.sharing.snapshot_files import MAX_FILE, SnapshotFiles
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.datasets.origin_access import OriginAccess
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.datasets.stamps import NO_STAMP, ChangeStamp, StampClock

log = logging.getLogger(__name__)

# Seconds for which news is gathered; and between two checks of pending unmounts.
GATHER_SECONDS: Final = 0.02
CHECK_SECONDS: Final = 2.0
# Seconds per node of the cluster, and at most, within which one of the nodes that know a dataset publishes it, if no
# other node does.
SPREAD_SECONDS: Final = 0.02
MAX_SPREAD_SECONDS: Final = 5.0
# First and last pause in seconds before a failed snapshot is fetched again: doubled each time.
MIN_RETRY_PAUSE: Final = 1.0
MAX_RETRY_PAUSE: Final = 30.0
# Problems listed.
MAX_PROBLEMS: Final = 20


class SharedDatasets:
    """Merges the datasets of this node with those of others, and fetches their snapshots. Used on the event loop."""

    def __init__(
        self,
        shared: SharedState,
        files: SnapshotFiles,
        local: LocalDatasets,
        is_coming_for_readers: Callable[[str], bool],
    ) -> None:
        """is_coming_for_readers: returns whether a snapshot is already being fetched because other nodes read it."""
        self._shared = shared
        self._files = files
        self._is_coming_for_readers = is_coming_for_readers
        self._local = local
        self._clock = StampClock(shared.membership.view.me)
        self._is_started = False
        self._names_to_check: set[str] = set()  # names to look at
        self._wakeup = asyncio.Event()
        self._fetch_tasks: dict[str, asyncio.Task[None]] = {}  # by name: task that fetches its snapshot
        self._coming_snapshots: dict[str, str] = {}  # by name: snapshot being fetched
        self._retries: dict[str, Backoff] = {}  # by name: retry after failures
        self._check_times: dict[str, float] = {}  # by name: monotonic time of the next look
        self._fetch_problems: dict[str, str] = {}  # by name: why its snapshot could not be fetched
        # By name: monotonic time at which this node publishes it, if no other node does.
        self._publish_times: dict[str, float] = {}
        self._problems: dict[str, str] = {}  # by name
        # Whether the directory of a URL exists here, by URL and listing: checked in a thread of its own, since a file
        # server may hang.
        self._directory_exists: dict[tuple[str, ChangeStamp], bool] = {}
        self._directory_thread = ThreadPoolExecutor(1, thread_name_prefix="shared-datasets")

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def is_catching_up(self) -> bool:
        """Whether news of other nodes is pending, or a snapshot is on its way here."""
        return bool(self._names_to_check or self._fetch_tasks)

    def is_coming(self, snapshot_id: str) -> bool:
        """Return whether the snapshot is on its way here."""
        return snapshot_id in self._coming_snapshots.values()

    def stamp(self) -> ChangeStamp:
        """Return the stamp of a change that is made on this node; NO_STAMP until `start`."""
        return self._clock.tick() if self._is_started else NO_STAMP

    def problems(self) -> list[str]:
        """Return the problems with datasets of the cluster on this node, one line each."""
        lines = [f"dataset {name}: {problem}" for name, problem in sorted(self._problems.items())]
        return lines[:MAX_PROBLEMS] + ([f"{len(lines) - MAX_PROBLEMS} more"] if len(lines) > MAX_PROBLEMS else [])

    # --- main loop ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to share this node's datasets. Raises CachefsError."""
        catalog = self._local.catalog
        for dataset in catalog:
            record = dataset.record
            self._clock.see([*record.added, record.listed, record.limited, record.reached])
        for added in (*catalog.removals.names.values(), catalog.removals.forgotten):
            self._clock.see(added)
        self._is_started = True
        await catalog.stamp_all()
        self._shared.add_listener(DATASETS, self._on_remote_change)
        for name in [*(dataset.record.name for dataset in catalog), *catalog.removals.names]:
            self.note_change(name)

    async def run(self) -> None:
        try:
            while True:
                now = time.monotonic()
                due = [name for name, when in self._check_times.items() if when <= now]
                for name in due:
                    del self._check_times[name]
                names, self._names_to_check = self._names_to_check | set(due), set()
                for name in sorted(names):
                    await self._check_name(name)
                await self._sleep()
        finally:
            tasks = list(self._fetch_tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._directory_thread.shutdown(wait=False, cancel_futures=True)

    async def _sleep(self) -> None:
        wait = min([CHECK_SECONDS, *(when - time.monotonic() for when in self._check_times.values())])
        if not self._names_to_check:
            self._wakeup.clear()
            try:
                async with asyncio.timeout(max(0.0, wait)):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
        await asyncio.sleep(GATHER_SECONDS)

    def note_change(self, name: str) -> None:
        """Check a dataset soon, since it has changed here or elsewhere."""
        self._names_to_check.add(name)
        self._wakeup.set()

    def _on_remote_change(self, node: str, name: str, value: SharedDataset | None) -> None:
        if value is not None:
            self._clock.see([*value.gone, *value.added, value.listed, value.limited, value.reached])
        self._retries.pop(name, None)
        self.note_change(name)

    def _check_later(self, name: str, seconds: float) -> None:
        when = time.monotonic() + seconds
        self._check_times[name] = min(when, self._check_times.get(name, when))

    # --- one name -----------------------------------------------------------------------------------------------------

    async def _check_name(self, name: str) -> None:
        """Bring this node in line with the merged meaning of the name, and publish it if no other node does."""
        try:
            await self._apply_merged(name)
        except CachefsError as error:
            self._set_problem(name, str(error))
            self._check_later(name, MAX_RETRY_PAUSE)
        except Exception as error:
            self._local.errors.add("datasets", f"internal error with dataset {name} ({error!r})", bug=error)
            self._check_later(name, MAX_RETRY_PAUSE)
        self._publish(name)

    def _states_of_others(self, name: str) -> dict[str, SharedDataset]:
        remote = self._shared.remote_values(DATASETS)
        return {node: value for node, values in remote.items() if (value := values.get(name)) is not None}

    def additions_elsewhere(self) -> Iterable[tuple[str, ChangeStamp]]:
        """Yield name and stamp of additions that other nodes have and this one does not."""
        for values in self._shared.remote_values(DATASETS).values():
            for name, value in values.items():
                dataset = self._local.catalog.find(name)
                own = dataset.record.added if dataset is not None else []
                yield from ((name, stamp) for stamp in value.added if not is_added(own, stamp))

    def stamps_elsewhere(self, name: str) -> Iterable[ChangeStamp]:
        """Yield the stamps of additions, by other nodes, of the dataset that this node has: several may have added it
        at once."""
        own = self._own_state(name)
        for value in self._states_of_others(name).values():
            if value.added and is_same(own, value):
                yield from value.added

    def _own_state(self, name: str) -> SharedDataset:
        """Return this node's state. With a damaged snapshot, the state of any other node is newer."""
        catalog = self._local.catalog
        dataset = catalog.find(name)
        gone = list(catalog.removals.names.get(name, ()))
        if dataset is None:
            return SharedDataset(gone=gone)
        record, snapshot = dataset.record, dataset.current
        value = SharedDataset(
            gone=gone,
            added=record.added,
            url=record.url,
            options=record.options,
            share=record.share,
            ttl=record.ttl,
            most=record.most,
            limited=record.limited,
            named=record.named,
            reached=record.reached,
        )
        if snapshot is None:
            return value
        return msgspec.structs.replace(
            value,
            listed=record.listed,
            snapshot=snapshot.id,
            file_size=max(1, self._local.open_snapshots.file_size(snapshot.id)),
            block_size=snapshot.block_size,
        )

    async def _apply_merged(self, name: str) -> None:
        """Apply the merged meaning of the name. Raises CachefsError."""
        own = self._own_state(name)
        resolution = resolve(own, self._states_of_others(name).values(), self._local.catalog.removals.is_forgotten)
        merged = resolution.value
        if merged.gone != own.gone:
            await self._local.catalog.note_removed(name, merged.gone)
        if own.added and not (merged.added and is_same(own, merged)):
            self._set_problem(name, await self._remove(name))
            return
        if merged.added and name not in self._fetch_tasks:
            await self._adopt_merged(name, own, merged)
        self._set_problem(name, self._problem_with(name, resolution))

    async def _adopt_merged(self, name: str, own: SharedDataset, merged: SharedDataset) -> None:
        """Adopt options, snapshot and limits. Raises CachefsError."""
        if own.added and merged.reached != own.reached:
            access = OriginAccess(merged.options, merged.named, merged.reached)
            await self._local.changes.apply_origin_access(name, access)
        if merged.snapshot and merged.snapshot != own.snapshot:
            if self._is_coming_for_readers(merged.snapshot):
                self._check_later(name, MIN_RETRY_PAUSE)
                return
            is_time = name not in self._retries or self._retries[name].is_due(time.monotonic())
            if merged.block_size == self._local.open_snapshots.block_size and is_time:
                self._coming_snapshots[name] = merged.snapshot
                task = self._fetch_tasks[name] = asyncio.create_task(self._fetch_snapshot(name, merged))
                task.add_done_callback(lambda _: self._on_fetch_end(name))
            return
        self._fetch_problems.pop(name, None)
        if (merged.added, merged.listed, merged.limited) != (own.added, own.listed, own.limited):
            fields = {field: getattr(merged, field) for field in ("added", "listed", "limited", "share", "ttl", "most")}
            await self._local.catalog.restamp(name, **fields)
            if (merged.share, merged.ttl, merged.most) != (own.share, own.ttl, own.most):
                await self._local.changes.follow_limits(self._local.catalog.get(name))

    def _problem_with(self, name: str, resolution: Resolution) -> str:
        """Return the problem with a dataset that is or should be here; empty if there is none."""
        merged, rival = resolution.value, resolution.rival
        if rival is not None:
            return (
                f"{merged.url} here, and {rival.url} {self._where_text(name, rival)}; remove one of them with "
                f"`cachectl dataset rm {name}` there, and add it under another name"
            )
        block_size = self._local.open_snapshots.block_size
        if merged.added and merged.snapshot and merged.block_size != block_size:
            return (
                f"it is listed with blocks of {format_size(merged.block_size)}, and daemon.block_size is "
                f"{format_size(block_size)} here, so it cannot be used; set the same on all nodes"
            )
        if name in self._fetch_problems:
            return f"its snapshot is not on this node: {self._fetch_problems[name]}; trying again"
        if merged.url.startswith("file://") and not self._is_directory_here(merged.url, merged.listed):
            return (
                f"{merged.url} is not on this node: its files are read through nodes that have it, and cannot be read "
                "while these are away"
            )
        return ""

    def _is_directory_here(self, url: str, listed: ChangeStamp) -> bool:
        """Return whether the directory of a file URL is on this node; True until checked."""
        key = (url, listed)
        if key not in self._directory_exists:
            self._directory_exists[key] = True
            path = unquote_to_bytes(url.removeprefix("file://"))
            look = asyncio.get_running_loop().run_in_executor(self._directory_thread, os.path.isdir, path)
            look.add_done_callback(lambda done: self._on_directory_checked(key, done))
        return self._directory_exists[key]

    def _on_directory_checked(self, key: tuple[str, ChangeStamp], done: "asyncio.Future[bool]") -> None:
        if not done.cancelled() and done.exception() is None and not done.result():
            self._directory_exists[key] = False
            for dataset in self._local.catalog:
                if dataset.record.url == key[0]:
                    self.note_change(dataset.record.name)

    def _where_text(self, name: str, value: SharedDataset) -> str:
        nodes = [record.name for node, value_there in self._states_of_others(name).items()
                 if value_there.added and is_same(value_there, value)
                 and (record := self._shared.node_record(node)) is not None]  # fmt: skip
        return f"on {', '.join(sorted(nodes)[:3])}" if nodes else "on another node"

    async def _remove(self, name: str) -> str:
        """Remove the dataset here. Returns a problem, or "". Raises CachefsError."""
        self._check_later(name, CHECK_SECONDS)
        if mountpoint := self._local.mountpoint_of(name):
            return f"it was removed from the cluster, and stays here until {mountpoint} is unmounted"
        try:
            await self._local.changes.remove(name)
        except Busy:
            return ""
        log.info("dataset %s was removed on another node", name)
        self.note_change(name)
        return ""

    # --- snapshots ----------------------------------------------------------------------------------------------------

    async def _fetch_snapshot(self, name: str, merged: SharedDataset) -> None:
        try:
            await self._adopt(name, merged)
            self._retries.pop(name, None)
            self._fetch_problems.pop(name, None)
        except Busy:
            self._retries.setdefault(name, _backoff()).until = time.monotonic() + CHECK_SECONDS
            self._check_later(name, CHECK_SECONDS)
        except CachefsError as error:
            self._retry_later(name, str(error))
        except Exception as error:
            self._retry_later(name, "internal error; see the daemon's log")
            self._local.errors.add("datasets", f"internal error with dataset {name} ({error!r})", bug=error)

    def _on_fetch_end(self, name: str) -> None:
        self._fetch_tasks.pop(name, None)
        self._coming_snapshots.pop(name, None)
        self.note_change(name)

    def _retry_later(self, name: str, why: str) -> None:
        self._fetch_problems[name] = why
        self._check_later(name, self._retries.setdefault(name, _backoff()).note_failure(time.monotonic()))

    async def _adopt(self, name: str, merged: SharedDataset) -> None:
        """Fetch the snapshot if needed, and adopt the dataset. Raises CachefsError."""
        catalog, open_snapshots = self._local.catalog, self._local.open_snapshots
        record = DatasetRecord(
            name,
            merged.url,
            merged.options,
            [SnapshotRecord(merged.snapshot)],
            share=merged.share,
            ttl=merged.ttl,
            most=merged.most,
            added=merged.added,
            listed=merged.listed,
            limited=merged.limited,
            named=merged.named,
            reached=merged.reached,
        )
        known = catalog.find(name)
        before = known.current if known is not None else None
        await catalog.check_origin(record)
        if open_snapshots.get(merged.snapshot) is not None:
            dataset = await catalog.adopt_dataset(record, None)
        else:
            with open_snapshots.receive_file() as path:
                most = partial(self._max_file_bytes, name)
                meta = await self._files.fetch(merged.snapshot, self._holders(name, merged), path, most)
                if meta.block_size != merged.block_size:
                    raise CachefsError(
                        f"it has blocks of {format_size(meta.block_size)}, and other nodes report another block size"
                    )
                dataset = await catalog.adopt_dataset(record, path)
        await self._local.changes.follow_snapshot(dataset, before)
        log.info("dataset %s is at snapshot %s, as on node %s", name, merged.snapshot, merged.listed.node)

    def _max_file_bytes(self, name: str) -> int:
        """Return the largest size of a dataset's snapshot file in bytes. Call when its turn comes. Raises Busy while
        the dataset is listed or removed here: the snapshot could not be adopted after its transfer."""
        self._local.catalog.check_idle(name)
        return MAX_FILE

    def _holders(self, name: str, merged: SharedDataset) -> list[str]:
        saying = [node for node, value in self._states_of_others(name).items() if value.snapshot == merged.snapshot]
        return [*saying, merged.listed.node]

    # --- publishing ---------------------------------------------------------------------------------------------------

    def _publish(self, name: str) -> None:
        value = self._own_state(name)
        is_published = self._shared.publishes(DATASETS, name)
        author = max([*value.gone, *value.added, value.listed, value.limited, value.reached]).node
        if not self._is_publisher(name, value, author, is_published):
            self._shared.remove(DATASETS, name)
        elif is_published or author == self._shared.membership.view.me or self._is_publication_due(name):
            self._publish_times.pop(name, None)
            self._shared.publish(DATASETS, name, value)

    def _is_publisher(self, name: str, value: SharedDataset, author: str, is_published: bool) -> bool:
        if not (value.snapshot if value.added else value.gone):
            return False
        covering = [node for node, other in self._states_of_others(name).items() if includes(other, value)]
        rank = _publisher_rank(author, name)
        mine = rank(self._shared.membership.view.me)
        if any(not is_published or rank(node) < mine for node in covering):
            self._publish_times.pop(name, None)
            return False
        return True

    def _is_publication_due(self, name: str) -> bool:
        """Return whether this node has waited long enough to publish a name without a publisher. The random wait lets
        one of the nodes that know the dataset come first."""
        now = time.monotonic()
        if name not in self._publish_times:
            most = min(MAX_SPREAD_SECONDS, max(1.0, SPREAD_SECONDS * len(self._shared.membership.view.members)))
            self._publish_times[name] = now + random.uniform(0.2, 1.0) * most
        self._check_later(name, self._publish_times[name] - now)
        return now >= self._publish_times[name]

    def _set_problem(self, name: str, problem: str) -> None:
        """Set the problem with a dataset; empty for none."""
        if self._problems.get(name, "") == problem:
            return
        self._problems.pop(name, None)
        if problem:
            self._problems[name] = problem
            self._local.errors.add(f"dataset {name}", problem)


def _publisher_rank(author: str, name: str) -> Callable[[str], tuple[bool, bytes]]:
    """Return a sort key of nodes: the first node publishes the name."""
    return lambda node: (node != author, hashlib.blake2b(f"{name}/{node}".encode(), digest_size=8).digest())


def _backoff() -> Backoff:
    return Backoff(MIN_RETRY_PAUSE, MAX_RETRY_PAUSE)
