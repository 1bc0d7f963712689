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

from cachefs.errors import Busy, CachefsError
from cachefs.sizes import format_size
from cachefs_daemon.content.dataset_merge import Resolution, covers, is_added, is_same, resolve
from cachefs_daemon.content.used_snapshots import ReadHere
from cachefs_daemon.datasets.reaching import OriginWay
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.datasets.stamps import Stamp, StampClock
from cachefs_daemon.runtime.backoff import Backoff
from cachefs_daemon.sharing.sections import DATASETS, SharedDataset
from cachefs_daemon.sharing.snapshot_files import MOST_FILE, SnapshotFiles
from cachefs_daemon.sharing.state import SharedState

log = logging.getLogger(__name__)

# Seconds for which news is gathered; and between two checks of pending unmounts.
GATHERED: Final = 0.02
LOOK_SECONDS: Final = 2.0
# Seconds per node of the cluster, and at most, within which one of the nodes that know a dataset publishes it, if no
# other node does.
SPREAD_SECONDS: Final = 0.02
MOST_SPREAD: Final = 5.0
# First and last pause in seconds before a failed snapshot is fetched again: doubled each time.
FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 30.0
# Problems listed.
MOST_SHOWN: Final = 20


class SharedDatasets:
    """Merges the datasets of this node with those of others, and fetches their snapshots. Used on the event loop."""

    def __init__(
        self, shared: SharedState, files: SnapshotFiles, here: ReadHere, has_otherwise: Callable[[str], bool]
    ) -> None:
        """has_otherwise: returns whether a snapshot is already being fetched because other nodes read it."""
        self._shared = shared
        self._files = files
        self._has_otherwise = has_otherwise
        self._here = here
        self._clock = StampClock(shared.membership.view.me)
        self._news: set[str] = set()  # names to look at
        self._wake = asyncio.Event()
        self._bringing: dict[str, asyncio.Task[None]] = {}  # by name: task that fetches its snapshot
        self._coming: dict[str, str] = {}  # by name: snapshot being fetched
        self._retry: dict[str, Backoff] = {}  # by name: retry after failures
        self._later: dict[str, float] = {}  # by name: monotonic time of the next look
        self._trouble: dict[str, str] = {}  # by name: why its snapshot could not be fetched
        # By name: monotonic time at which this node publishes it, if no other node does.
        self._unsaid: dict[str, float] = {}
        self._problems: dict[str, str] = {}  # by name
        # Whether the directory of a URL exists here, by URL and listing: checked in a thread of its own, since a file
        # server may hang.
        self._looked: dict[tuple[str, Stamp], bool] = {}
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="shared-datasets")

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether news of other nodes is pending, or a snapshot is on its way here."""
        return bool(self._news or self._bringing)

    def is_coming(self, snapshot_id: str) -> bool:
        """Return whether the snapshot is on its way here."""
        return snapshot_id in self._coming.values()

    def problems(self) -> list[str]:
        """Return the problems with datasets of the cluster on this node, one line each."""
        lines = [f"dataset {name}: {problem}" for name, problem in sorted(self._problems.items())]
        return lines[:MOST_SHOWN] + ([f"{len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else [])

    # --- main loop ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to share this node's datasets. Raises CachefsError."""
        catalog = self._here.catalog
        for dataset in catalog:
            record = dataset.record
            self._clock.see([*record.added, record.listed, record.limited, record.reached])
        for added in (*catalog.removals.names.values(), catalog.removals.forgotten):
            self._clock.see(added)
        catalog.stamp = self._clock.tick
        catalog.on_change = self._note
        catalog.elsewhere = self._elsewhere
        catalog.added_elsewhere = self._added_elsewhere
        await catalog.stamp_all()
        self._shared.listen(DATASETS, self._heard)
        for name in [*(dataset.record.name for dataset in catalog), *catalog.removals.names]:
            self._note(name)

    async def run(self) -> None:
        try:
            while True:
                now = time.monotonic()
                due = [name for name, when in self._later.items() if when <= now]
                for name in due:
                    del self._later[name]
                news, self._news = self._news | set(due), set()
                for name in sorted(news):
                    await self._look_at(name)
                await self._sleep()
        finally:
            tasks = list(self._bringing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._aside.shutdown(wait=False, cancel_futures=True)

    async def _sleep(self) -> None:
        wait = min([LOOK_SECONDS, *(when - time.monotonic() for when in self._later.values())])
        if not self._news:
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, wait)):
                    await self._wake.wait()
            except TimeoutError:
                pass
        await asyncio.sleep(GATHERED)

    def _note(self, name: str) -> None:
        self._news.add(name)
        self._wake.set()

    def _heard(self, node: str, name: str, value: SharedDataset | None) -> None:
        if value is not None:
            self._clock.see([*value.gone, *value.added, value.listed, value.limited, value.reached])
        self._retry.pop(name, None)
        self._note(name)

    def _again(self, name: str, seconds: float) -> None:
        when = time.monotonic() + seconds
        self._later[name] = min(when, self._later.get(name, when))

    # --- one name -----------------------------------------------------------------------------------------------------

    async def _look_at(self, name: str) -> None:
        """Bring this node in line with the merged meaning of the name, and publish it if no other node does."""
        try:
            await self._follow(name)
        except CachefsError as error:
            self._say(name, str(error))
            self._again(name, LAST_PAUSE)
        except Exception as error:
            self._here.errors.add("datasets", f"internal error with dataset {name} ({error!r})", bug=error)
            self._again(name, LAST_PAUSE)
        self._publish(name)

    def _others(self, name: str) -> dict[str, SharedDataset]:
        said = self._shared.values(DATASETS)
        return {node: value for node, values in said.items() if (value := values.get(name)) is not None}

    def _elsewhere(self) -> Iterable[tuple[str, Stamp]]:
        """Yield name and stamp of additions that other nodes have and this one does not."""
        for values in self._shared.values(DATASETS).values():
            for name, value in values.items():
                dataset = self._here.catalog.find(name)
                own = dataset.record.added if dataset is not None else []
                yield from ((name, stamp) for stamp in value.added if not is_added(own, stamp))

    def _added_elsewhere(self, name: str) -> Iterable[Stamp]:
        """Yield the stamps of additions, by other nodes, of the dataset that this node has: several may have added it
        at once."""
        own = self._own(name)
        for value in self._others(name).values():
            if value.added and is_same(own, value):
                yield from value.added

    def _own(self, name: str) -> SharedDataset:
        """Return this node's state. With a damaged snapshot, the state of any other node is newer."""
        catalog = self._here.catalog
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
            file_size=max(1, self._here.held.file_size(snapshot.id)),
            block_size=snapshot.block_size,
        )

    async def _follow(self, name: str) -> None:
        """Apply the merged meaning of the name. Raises CachefsError."""
        own = self._own(name)
        resolution = resolve(own, self._others(name).values(), self._here.catalog.removals.is_forgotten)
        wanted = resolution.value
        if wanted.gone != own.gone:
            await self._here.catalog.note_removed(name, wanted.gone)
        if own.added and not (wanted.added and is_same(own, wanted)):
            self._say(name, await self._remove(name))
            return
        if wanted.added and name not in self._bringing:
            await self._have(name, own, wanted)
        self._say(name, self._problem(name, resolution))

    async def _have(self, name: str, own: SharedDataset, wanted: SharedDataset) -> None:
        """Adopt options, snapshot and limits. Raises CachefsError."""
        if own.added and wanted.reached != own.reached:
            way = OriginWay(wanted.options, wanted.named, wanted.reached)
            await self._here.changes.follow_way(name, way)
        if wanted.snapshot and wanted.snapshot != own.snapshot:
            if self._has_otherwise(wanted.snapshot):
                self._again(name, FIRST_PAUSE)
                return
            is_time = name not in self._retry or self._retry[name].is_due(time.monotonic())
            if wanted.block_size == self._here.held.block_size and is_time:
                self._coming[name] = wanted.snapshot
                task = self._bringing[name] = asyncio.create_task(self._bring(name, wanted))
                task.add_done_callback(lambda _: self._brought(name))
            return
        self._trouble.pop(name, None)
        if (wanted.added, wanted.listed, wanted.limited) != (own.added, own.listed, own.limited):
            fields = {field: getattr(wanted, field) for field in ("added", "listed", "limited", "share", "ttl", "most")}
            await self._here.catalog.restamp(name, **fields)
            if (wanted.share, wanted.ttl, wanted.most) != (own.share, own.ttl, own.most):
                await self._here.changes.follow_limits(self._here.catalog.get(name))

    def _problem(self, name: str, resolution: Resolution) -> str:
        """Return the problem with a dataset that is or should be here; empty if there is none."""
        wanted, rival = resolution.value, resolution.rival
        if rival is not None:
            return (
                f"{wanted.url} here, and {rival.url} {self._where(name, rival)}; remove one of them with `cachectl "
                f"dataset rm {name}` there, and add it under another name"
            )
        block_size = self._here.held.block_size
        if wanted.added and wanted.snapshot and wanted.block_size != block_size:
            return (
                f"it is listed with blocks of {format_size(wanted.block_size)}, and daemon.block_size is "
                f"{format_size(block_size)} here, so it cannot be used; set the same on all nodes"
            )
        if name in self._trouble:
            return f"its snapshot is not here: {self._trouble[name]}; it is tried again"
        if wanted.url.startswith("file://") and not self._is_here(wanted.url, wanted.listed):
            return (
                f"{wanted.url} is not on this node: its files are read from nodes that have it, and not when these "
                "are away"
            )
        return ""

    def _is_here(self, url: str, listed: Stamp) -> bool:
        """Return whether the directory of a file URL is on this node; True until checked."""
        key = (url, listed)
        if key not in self._looked:
            self._looked[key] = True
            path = unquote_to_bytes(url.removeprefix("file://"))
            look = asyncio.get_running_loop().run_in_executor(self._aside, os.path.isdir, path)
            look.add_done_callback(lambda done: self._found(key, done))
        return self._looked[key]

    def _found(self, key: tuple[str, Stamp], done: "asyncio.Future[bool]") -> None:
        if not done.cancelled() and done.exception() is None and not done.result():
            self._looked[key] = False
            for dataset in self._here.catalog:
                if dataset.record.url == key[0]:
                    self._note(dataset.record.name)

    def _where(self, name: str, value: SharedDataset) -> str:
        nodes = [record.name for node, said in self._others(name).items() if said.added and is_same(said, value)
                 and (record := self._shared.node(node)) is not None]  # fmt: skip
        return f"on {', '.join(sorted(nodes)[:3])}" if nodes else "on another node"

    async def _remove(self, name: str) -> str:
        """Remove the dataset here. Returns a problem, or "". Raises CachefsError."""
        self._again(name, LOOK_SECONDS)
        if mountpoint := self._here.mounted(name):
            return f"it was removed from the cluster, and stays here until {mountpoint} is unmounted"
        try:
            await self._here.changes.remove(name)
        except Busy:
            return ""
        log.info("dataset %s was removed on another node", name)
        self._note(name)
        return ""

    # --- snapshots ----------------------------------------------------------------------------------------------------

    async def _bring(self, name: str, wanted: SharedDataset) -> None:
        try:
            await self._adopt(name, wanted)
            self._retry.pop(name, None)
            self._trouble.pop(name, None)
        except Busy:
            self._retry.setdefault(name, _backoff()).until = time.monotonic() + LOOK_SECONDS
            self._again(name, LOOK_SECONDS)
        except CachefsError as error:
            self._give_up_for_now(name, str(error))
        except Exception as error:
            self._give_up_for_now(name, "internal error; see the daemon's log")
            self._here.errors.add("datasets", f"internal error with dataset {name} ({error!r})", bug=error)

    def _brought(self, name: str) -> None:
        self._bringing.pop(name, None)
        self._coming.pop(name, None)
        self._note(name)

    def _give_up_for_now(self, name: str, why: str) -> None:
        self._trouble[name] = why
        self._again(name, self._retry.setdefault(name, _backoff()).fail(time.monotonic()))

    async def _adopt(self, name: str, wanted: SharedDataset) -> None:
        """Fetch the snapshot if needed, and adopt the dataset. Raises CachefsError."""
        catalog, held = self._here.catalog, self._here.held
        record = DatasetRecord(
            name,
            wanted.url,
            wanted.options,
            [SnapshotRecord(wanted.snapshot)],
            share=wanted.share,
            ttl=wanted.ttl,
            most=wanted.most,
            added=wanted.added,
            listed=wanted.listed,
            limited=wanted.limited,
            named=wanted.named,
            reached=wanted.reached,
        )
        known = catalog.find(name)
        before = known.current if known is not None else None
        await catalog.check(record)
        if held.get(wanted.snapshot) is not None:
            dataset = await catalog.adopt(record, None)
        else:
            with held.receiving() as path:
                most = partial(self._most_bytes, name)
                meta = await self._files.fetch(wanted.snapshot, self._holders(name, wanted), path, most)
                if meta.block_size != wanted.block_size:
                    raise CachefsError(f"it has blocks of {format_size(meta.block_size)}, and others say otherwise")
                dataset = await catalog.adopt(record, path)
        await self._here.changes.follow(dataset, before)
        log.info("dataset %s is at snapshot %s, as on node %s", name, wanted.snapshot, wanted.listed.node)

    def _most_bytes(self, name: str) -> int:
        """Return the largest size of a dataset's snapshot file in bytes. Call when its turn comes. Raises Busy while
        the dataset is listed or removed here: the snapshot could not be adopted after its transfer."""
        self._here.catalog.check_idle(name)
        return MOST_FILE

    def _holders(self, name: str, wanted: SharedDataset) -> list[str]:
        saying = [node for node, value in self._others(name).items() if value.snapshot == wanted.snapshot]
        return [*saying, wanted.listed.node]

    # --- publishing ---------------------------------------------------------------------------------------------------

    def _publish(self, name: str) -> None:
        value = self._own(name)
        said = self._shared.says(DATASETS, name)
        author = max([*value.gone, *value.added, value.listed, value.limited, value.reached]).node
        if not self._is_mine_to_say(name, value, author, said):
            self._shared.remove(DATASETS, name)
        elif said or author == self._shared.membership.view.me or self._has_waited(name):
            self._unsaid.pop(name, None)
            self._shared.publish(DATASETS, name, value)

    def _is_mine_to_say(self, name: str, value: SharedDataset, author: str, said: bool) -> bool:
        if not (value.snapshot if value.added else value.gone):
            return False
        covering = [node for node, other in self._others(name).items() if covers(other, value)]
        rank = _rank(author, name)
        mine = rank(self._shared.membership.view.me)
        if any(not said or rank(node) < mine for node in covering):
            self._unsaid.pop(name, None)
            return False
        return True

    def _has_waited(self, name: str) -> bool:
        """Return whether this node has waited long enough to publish a name without a publisher. The random wait lets
        one of the nodes that know the dataset come first."""
        now = time.monotonic()
        if name not in self._unsaid:
            most = min(MOST_SPREAD, max(1.0, SPREAD_SECONDS * len(self._shared.membership.view.members)))
            self._unsaid[name] = now + random.uniform(0.2, 1.0) * most
        self._again(name, self._unsaid[name] - now)
        return now >= self._unsaid[name]

    def _say(self, name: str, problem: str) -> None:
        """Set the problem with a dataset; empty for none."""
        if self._problems.get(name, "") == problem:
            return
        self._problems.pop(name, None)
        if problem:
            self._problems[name] = problem
            self._here.errors.add(f"dataset {name}", problem)


def _rank(author: str, name: str) -> Callable[[str], tuple[bool, bytes]]:
    """Return a sort key of nodes: the first node publishes the name."""
    return lambda node: (node != author, hashlib.blake2b(f"{name}/{node}".encode(), digest_size=8).digest())


def _backoff() -> Backoff:
    return Backoff(FIRST_PAUSE, LAST_PAUSE)
