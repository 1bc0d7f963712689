"""Warm-ups of the whole cluster.

Each node learns of a warm-up from the shared state, keeps it on disk, and fetches its own part (`part`). So a warm-up
does not depend on the node where it was requested, goes on after a restart of any daemon, and may be cancelled on any
node. When members come or go, each node plans its part anew: the part of a node that has died falls to those that keep
its blocks then. A warm-up is over once each member's part is done, among the same members and of the same snapshot.
"""

import asyncio
import dataclasses
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from cachefs.errors import Busy, CachefsError, ConfigError, NotFound
from cachefs.formatting import format_duration
from cachefs.messages import (
    DatasetAmount,
    WarmupForecast,
    WarmupNodeForecast,
    WarmupProgress,
    WarmupRequest,
)  # fmt: skip
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.rendezvous import space_hashes
from cachefs.planning.cluster.warmup import member_parts
from cachefs.snapshot import Snapshot
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.placement.cooperation import placement_ring_of
from cachefs_cluster.placement.holders import PlacementRing
from cachefs_cluster.placement.rebalance_status import ring_digest
from cachefs_cluster.sharing.sections import (
    CONSUMERS,
    MAX_WARMUP_PATHS,
    WARMUP_PARTS,
    WARMUPS,
    WarmupFacts,
    WarmupPart,
)  # fmt: skip
from cachefs_cluster.sharing.state import SharedState
from cachefs_cluster.warmups.part import LocalPart, PartFetcher, PartTarget
from cachefs_cluster.warmups.progress import PartOwner, WarmupScene, end_message, merge, one_line, summarise
from cachefs_daemon.content.warmup import plan_warmup
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.jobs.owners import name_without_owner
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.runtime.autosave import autosave, replace_file
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import spans

log = logging.getLogger(__name__)

FILE_NAME: Final = "cluster-warmups.msgpack"
# Most warm-ups of the cluster that have not ended, and ended ones that are kept.
MAX_OPEN: Final = 32
MAX_ENDED: Final = 64
# Warm-ups of other nodes that are taken up, beyond which something is wrong with a node.
MAX_KNOWN: Final = 256
# Numbers of warm-ups: seven digits, other than those of a node's own ones.
FIRST_NUMBER: Final = 1_000_000
# Seconds for which an ended warm-up is remembered beyond its time: a node that was away does not bring it back.
KEPT_SECONDS: Final = 30 * 86_400.0
# Seconds ahead of its begin for which a warm-up may be requested, and for which it waits for a job.
MAX_AHEAD_SECONDS: Final = 366 * 86_400.0
MAX_JOB_SECONDS: Final = 7 * 86_400.0
# Seconds by which clocks may differ: a time that is past by less means now.
CLOCK_SECONDS: Final = 60.0
# Seconds after which a warm-up ends without nodes that tell nothing of their parts, once all others are done; and after
# which a node without the dataset gives up.
SILENT_SECONDS: Final = 60.0
# Seconds between two steps, and between two publications of a part's numbers; longer with more than 50 nodes.
STEP_SECONDS: Final = 0.25
PUBLISH_SECONDS: Final = 0.5
# Seconds between two reports to a watcher.
REPORT_SECONDS: Final = 0.5
# A warm-up of which no part has begun, or that has ended.
NO_SCENE: Final = WarmupScene((), {}, ("", ""))


@dataclass(frozen=True, slots=True)
class ClusterWarmupParts:
    """The parts of the node that warm-ups of the cluster use."""

    shared: SharedState
    catalog: Catalog
    jobs: JobRegistry
    threads: Threads
    fetcher: PartFetcher
    state_dir: Path
    # Seconds for which a node that is away keeps its part.
    grace: float


@dataclass(slots=True, eq=False)
class _Record:
    """A warm-up, as this node knows it."""

    facts: WarmupFacts
    part: LocalPart = field(default_factory=LocalPart)
    task: "asyncio.Task[None] | None" = None
    # Target of the task; None: no part has begun, or it is to be planned anew.
    target: PartTarget | None = None
    published_at: float = 0.0  # monotonic time
    # Monotonic time since when the dataset has been missing here, and since when only silent nodes are unfinished.
    absent_since: float = 0.0
    silent_since: float = 0.0


class ClusterWarmups:
    """All warm-ups of the cluster. Implements `cachefs_daemon.ports.SharedWarmups`. Used on the event loop."""

    def __init__(self, parts: ClusterWarmupParts) -> None:
        self._parts = parts
        self._shared = parts.shared
        self._membership = parts.shared.membership
        self._records: dict[int, _Record] = {}  # by number
        self._ring = PlacementRing(0, (), ())
        self._view: ClusterView | None = None  # of `_ring`
        self._away_text = f"does not answer; after {parts.grace:.0f} s of that, others take its part over"
        self._path = parts.state_dir / FILE_NAME
        self._has_unsaved = False
        self._wakeup = asyncio.Event()
        self._shared.add_listener(WARMUPS, self._on_remote_facts)

    # --- requests -----------------------------------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        return number in self._records

    async def begin(self, request: WarmupRequest) -> WarmupProgress:
        """Begin a warm-up on all nodes, or schedule it. Raises CachefsError."""
        now = time.time()
        _check_times(request, now)
        if sum(map(len, request.paths)) > MAX_WARMUP_PATHS:
            raise ConfigError(
                f"the paths have more than {MAX_WARMUP_PATHS:,} bytes together, and a warmup of the cluster names no "
                "more; name directories, or use --list without --cluster on each node"
            )
        snapshot = self._parts.catalog.snapshot(request.dataset)
        forecast, missing = await self._forecast(request, snapshot)
        running = sum(not record.facts.ended for record in self._records.values())
        if running >= MAX_OPEN:
            raise Busy(f"{running} warmups of the cluster run or wait already; see `cachectl warmups`")
        whole = sum(one.bytes for one in forecast.nodes)
        number = FIRST_NUMBER + secrets.randbelow(9 * FIRST_NUMBER)
        while number in self._records:
            number = FIRST_NUMBER + secrets.randbelow(9 * FIRST_NUMBER)
        is_scheduled = bool(request.before) or request.at > now
        facts = WarmupFacts(
            request.dataset,
            self._membership.view.me,
            now,
            paths=request.paths,
            fraction=request.fraction,
            leave_out_missing=request.leave_out_missing,
            at=request.at,
            before=request.before,
            holds=forecast.holds if forecast.holds < whole else -1,
            started=0.0 if is_scheduled else now,
        )
        try:
            WARMUPS.check(str(number), facts)
        except ValueError as error:
            raise ConfigError(f"the request has {error}") from None
        record = self._records[number] = _Record(facts)
        record.part.missing = missing
        record.part.selected = forecast.wanted.bytes, forecast.wanted.blocks
        self._note_changed()
        log.info("warmup %d of %s on the whole cluster was requested here", number, request.dataset)
        return self._progress(number, record)

    async def forecast(self, request: WarmupRequest) -> WarmupForecast:
        """Forecast a warm-up: what each node keeps of it and can hold. Raises CachefsError."""
        return (await self._forecast(request, self._parts.catalog.snapshot(request.dataset)))[0]

    async def _forecast(self, request: WarmupRequest, snapshot: Snapshot) -> tuple[WarmupForecast, tuple[int, str]]:
        self._follow_ring()
        ring, view = self._ring, self._membership.view
        names = [record.name if (record := view.get(one)) is not None else one for one in ring.ids]
        share = self._parts.catalog.get(request.dataset).record.share
        capacities = [int(share * capacity) for capacity in ring.capacities]
        return await self._parts.threads.planning(_forecast, request, snapshot, ring, names, capacities)

    def progress(self) -> list[WarmupProgress]:
        """Return the progress of all warm-ups, oldest first."""
        known = sorted(self._records.items(), key=lambda each: (each[1].facts.begun, each[0]))
        return [self._progress(number, record) for number, record in known]

    async def watch(self, number: int) -> AsyncGenerator[WarmupProgress, None]:
        """Yield the progress of a warm-up until its end, which does not depend on the caller. Raises NotFound."""
        while True:
            record = self._record_of(number)
            yield self._progress(number, record)
            if record.facts.ended:
                return
            await asyncio.sleep(REPORT_SECONDS)

    async def cancel(self, number: int) -> WarmupProgress:
        """Cancel a warm-up on all nodes; fetched blocks stay. Raises NotFound."""
        record = self._record_of(number)
        if not record.facts.ended:
            me = self._membership.view.own_record
            self._end(number, record, "cancelled", f"cancelled on {me.name}" if me is not None else "")
        return self._progress(number, record)

    def _record_of(self, number: int) -> _Record:
        if number not in self._records:
            raise NotFound(f"there is no warmup {number}; `cachectl warmups` shows the existing ones")
        return self._records[number]

    def _progress(self, number: int, record: _Record) -> WarmupProgress:
        missing, first = record.part.missing
        is_running = record.facts.started and not record.facts.ended
        scene = self._scene(number, record) if is_running else NO_SCENE
        progress = summarise(number, record.facts, scene, time.time())
        if not record.facts.started:
            size, blocks = record.part.selected
            progress = msgspec.structs.replace(progress, bytes_total=size, blocks_total=blocks)
        return msgspec.structs.replace(progress, missing=missing, first_missing=first)

    def _scene(self, number: int, record: _Record) -> WarmupScene:
        """Return what is known of the parts of all members."""
        view, name, own = self._membership.view, str(number), record.part
        parts = {
            one: part
            for one in self._ring.ids
            if (part := self._shared.remote_value(WARMUP_PARTS, one, name)) is not None
        }
        if view.me in self._ring.ids:
            parts[view.me] = own.published()
        size, blocks = own.selected
        owners = [
            PartOwner(one, member.name, self._away_text if member.state == "away" else "")
            for one in self._ring.ids
            if (member := view.get(one)) is not None
        ]
        known = [(part.ring, part.snapshot) for part in parts.values() if part.snapshot]
        key = own.key if own.key[1] or not known else max(sorted(set(known)), key=known.count)
        return WarmupScene(owners, parts, key, (size, blocks))

    # --- main loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out warm-ups as long as the daemon runs."""
        save = asyncio.create_task(autosave(self._save, "warmups of the cluster are not resumed"))
        try:
            while True:
                self._wakeup.clear()
                self._follow_ring()
                for number, record in list(self._records.items()):
                    try:
                        self._step(number, record)
                    except Exception:
                        if not record.part.has_failed:
                            log.exception("warmup %d of the cluster failed unexpectedly", number)
                        self._fail(record, "internal error; see the daemon's log")
                    self._publish(number, record)
                self._forget_old()
                try:
                    async with asyncio.timeout(max(STEP_SECONDS, len(self._ring.ids) / 500)):
                        await self._wakeup.wait()
                except TimeoutError:
                    pass
        finally:
            tasks = [save, *(record.task for record in self._records.values() if record.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _step(self, number: int, record: _Record) -> None:
        """Do what is due now."""
        facts, now = record.facts, time.time()
        if facts.ended:
            return
        if not facts.started:
            if not self._is_due(facts, now):
                if facts.before and now - facts.begun > MAX_JOB_SECONDS:
                    days = f"{MAX_JOB_SECONDS / 86_400:.0f} days"
                    self._end(number, record, "failed", f"job {facts.before} has not been seen for {days}")
                return
            record.facts = facts = msgspec.structs.replace(facts, started=now)
            self._note_changed()
        self._follow_target(number, record)
        self._end_if_done(number, record)

    def _is_due(self, facts: WarmupFacts, now: float) -> bool:
        if not facts.before:
            return now >= facts.at
        own = (consumer.request.job for consumer in self._parts.jobs.consumers)
        others = (
            consumer.job for values in self._shared.remote_values(CONSUMERS).values() for consumer in values.values()
        )
        return any(facts.before in (job, name_without_owner(job)) for jobs in (own, others) for job in jobs)

    def _follow_target(self, number: int, record: _Record) -> None:
        """Plan this node's part anew, if members or the snapshot have changed."""
        found = self._parts.catalog.find(record.facts.dataset)
        snapshot = found.current if found is not None else None
        if not self._ring.ids or self._membership.view.me not in self._ring.ids:
            self._stop_part(record)
            record.part = LocalPart(state="done", missing=record.part.missing, selected=record.part.selected)
            return
        if snapshot is None:
            self._stop_part(record)
            self._wait_for_dataset(record)
            return
        record.absent_since = 0.0
        target = PartTarget(self._ring, snapshot)
        if record.target is None or record.target.key != target.key:
            self._stop_part(record)
            record.part = LocalPart(missing=record.part.missing, selected=record.part.selected)
            record.part.state, record.part.key, record.target = "planning", target.key, target
            request = WarmupRequest(
                dataset=record.facts.dataset,
                paths=record.facts.paths,
                fraction=record.facts.fraction,
                wait=False,
                leave_out_missing=True,
                before=record.facts.before,
            )
            record.task = asyncio.create_task(self._fetch_part(number, record, request, target))
        elif record.part.state == "running" and not record.part.reason:
            reason = self._parts.fetcher.slowness_reason(record.facts.dataset)
            record.part.slowness = one_line(reason)

    async def _fetch_part(self, number: int, record: _Record, request: WarmupRequest, target: PartTarget) -> None:
        try:
            await self._parts.fetcher.fetch(number, request, target, record.part)
        except CachefsError as error:
            self._fail(record, str(error))
        except Exception:
            log.exception("warmup %d of %s failed unexpectedly", number, request.dataset)
            self._fail(record, "internal error; see the daemon's log")
        self._wakeup.set()

    def _fail(self, record: _Record, reason: str) -> None:
        record.part.state, record.part.reason, record.part.has_failed = "done", one_line(reason), True

    def _wait_for_dataset(self, record: _Record) -> None:
        record.target = None
        record.absent_since = record.absent_since or time.monotonic()
        reason = "the dataset is not on this node"
        if record.part.state != "done":
            record.part.state, record.part.key, record.part.reason = "waiting", (self._ring_key(), ""), reason
        if time.monotonic() - record.absent_since > SILENT_SECONDS:
            self._fail(record, reason)

    def _stop_part(self, record: _Record) -> None:
        if record.task is not None:
            record.task.cancel()
        record.task = record.target = None

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end_if_done(self, number: int, record: _Record) -> None:
        """End the warm-up once all parts are done. The first member whose part is known decides; the others follow."""
        scene = self._scene(number, record)
        unfinished, silent = scene.unfinished(), scene.silent()
        if not scene.owners or len(unfinished) > len(silent):
            record.silent_since = 0.0
            return
        now = time.monotonic()
        if silent:
            record.silent_since = record.silent_since or now
            if now - record.silent_since < SILENT_SECONDS or len(silent) == len(scene.owners):
                return
        parts = ((one.id, scene.current_part(one.id)) for one in scene.owners)
        deciding = next((node for node, part in parts if part is not None and part.snapshot == scene.key[1]), "")
        if deciding != self._membership.view.me:
            return
        message = end_message(scene)
        self._end(number, record, "failed" if message else "done", message)

    def _end(self, number: int, record: _Record, state: str, message: str) -> None:
        totals = self._scene(number, record).totals()
        record.facts = msgspec.structs.replace(
            record.facts, ended=time.time(), state=state, message=one_line(message), totals=totals, paths=[]
        )
        self._clean_up(number, record)
        self._note_changed()

    def _clean_up(self, number: int, record: _Record) -> None:
        """Stop what is under way for a warm-up that has ended."""
        self._stop_part(record)
        self._shared.remove(WARMUP_PARTS, str(number))
        facts = record.facts
        log.info(
            "warmup %d of %s on the whole cluster %s: %d of %d blocks, %d without room, %d failed%s",
            number, facts.dataset, facts.state, facts.totals.blocks, facts.totals.blocks_total, facts.totals.skipped,
            facts.totals.failed, f" ({facts.message})" if facts.message else "",
        )  # fmt: skip

    def _forget_old(self) -> None:
        ended = sorted(
            (number for number, record in self._records.items() if record.facts.ended),
            key=lambda number: self._records[number].facts.ended,
        )
        for number in ended:
            if len(ended) > MAX_ENDED or _is_old(self._records[number].facts, time.time()):
                ended = ended[1:]
                del self._records[number]
                self._shared.remove(WARMUPS, str(number))
                self._has_unsaved = True

    # --- members ------------------------------------------------------------------------------------------------------

    def _follow_ring(self) -> None:
        """Follow the members that keep blocks. One that is away counts until its grace is over: a daemon that is
        restarted finds its part as it was."""
        view = self._membership.view
        if view is not self._view:
            self._view = view
            members = tuple(dataclasses.replace(record, state="active") for record in view.members)
            self._ring = placement_ring_of(dataclasses.replace(view, members=members))

    def _ring_key(self) -> str:
        return ring_digest(self._ring.ids)

    # --- sharing ------------------------------------------------------------------------------------------------------

    def _on_remote_facts(self, node: str, name: str, value: WarmupFacts | None) -> None:
        """Take in what another node has published."""
        number = int(name)
        record = self._records.get(number)
        if value is None:
            self._wakeup.set()
            return
        if record is None:
            if _is_old(value, time.time()):
                return
            if len(self._records) >= MAX_KNOWN:
                log.warning("warmup %d, which node %s has published, is one too many, and is ignored", number, node)
                return
            record = self._records[number] = _Record(value)
            self._note_changed()
            if not value.ended:
                log.info("warmup %d of %s on the whole cluster was requested on another node", number, value.dataset)
            return
        merged = merge(record.facts, value)
        if merged != record.facts:
            was_open, record.facts = not record.facts.ended, merged
            if was_open and merged.ended:
                self._clean_up(number, record)
            self._note_changed()

    def _publish(self, number: int, record: _Record) -> None:
        name = str(number)
        if self._is_publisher(name, record.facts):
            self._shared.publish(WARMUPS, name, record.facts)
        elif self._shared.publishes(WARMUPS, name):
            self._shared.remove(WARMUPS, name)
        if record.facts.ended or not record.facts.started or self._membership.view.me not in self._ring.ids:
            self._shared.remove(WARMUP_PARTS, name)
            return
        now, part = time.monotonic(), record.part.published()
        before = self._shared.own_value(WARMUP_PARTS, name)
        is_due = now - record.published_at >= max(PUBLISH_SECONDS, len(self._ring.ids) / 50)
        if before is None or _state_of(before) != _state_of(part) or is_due:
            record.published_at = now
            self._shared.publish(WARMUP_PARTS, name, part)

    def _is_publisher(self, name: str, facts: WarmupFacts) -> bool:
        """Return whether this node is to publish a warm-up: the one where it was requested, if it is there, and else
        the first in an order that differs for each warm-up. Of an ended one, only what others do not know yet."""
        view = self._membership.view
        if facts.author == view.me:
            return True
        published = {
            record.id: value
            for record in view.others
            if record.state != "away" and (value := self._shared.remote_value(WARMUPS, record.id, name)) is not None
        }
        if facts.ended and all(value == facts for value in published.values()):
            return False
        mine = _publisher_rank(view.me, name)
        return not any(
            value == facts and (node == facts.author or _publisher_rank(node, name) < mine)
            for node, value in published.items()
        )

    def _note_changed(self) -> None:
        self._has_unsaved = True
        self._wakeup.set()

    # --- persistence --------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Take up the warm-ups that the previous daemon knew."""
        now = time.time()
        for number, facts in (await self._parts.threads.background(_load, self._path)).items():
            if not _is_old(facts, now):
                self._records[number] = _Record(facts)
                if not facts.ended:
                    log.info("warmup %d of %s on the whole cluster is resumed", number, facts.dataset)

    async def _save(self) -> None:
        """Write the file if anything has changed. Raises OSError; the old file then stays."""
        if self._has_unsaved:
            self._has_unsaved = False
            facts = {str(number): record.facts for number, record in self._records.items()}
            try:
                await self._parts.threads.background(_write, self._path, facts)
            except BaseException:
                self._has_unsaved = True
                raise


def _check_times(request: WarmupRequest, now: float) -> None:
    """Raise ConfigError for a time that cannot be meant."""
    if request.at and request.before:
        raise ConfigError("a warmup begins at a time, or before a job, but not both")
    if request.at and request.at < now - CLOCK_SECONDS:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.at))
        raise ConfigError(f"{when} is past by {format_duration(now - request.at)}; without --at the warmup begins now")
    if request.at > now + MAX_AHEAD_SECONDS:
        raise ConfigError(
            f"{format_duration(request.at - now)} ahead is more than the {MAX_AHEAD_SECONDS / 86_400:.0f} days that a "
            "warmup may wait; use a scheduler such as cron to begin it then"
        )


def _forecast(
    request: WarmupRequest,
    snapshot: Snapshot,
    ring: PlacementRing,
    names: Sequence[str],
    capacities: Sequence[int],
) -> tuple[WarmupForecast, tuple[int, str]]:
    """Return the forecast, and the number and the first of paths that are not in the snapshot."""
    plan = plan_warmup(snapshot, request)
    space = BlockSpace.of(snapshot)
    _, ids = space.blocks_of(np.frombuffer(plan.files, np.uint64).astype(np.int64))
    sizes = space.sizes[ids].astype(np.int64)
    parts = member_parts(space_hashes(space)[ids], sizes, spans(sizes), ring.members, capacities)
    forecast = WarmupForecast(
        wanted=DatasetAmount(files=len(plan.files), blocks=plan.blocks, bytes=plan.bytes),
        here=DatasetAmount(files=0, blocks=0, bytes=0),
        free=sum(capacities),
        holds=sum(part.holds for part in parts),
        nodes=[
            WarmupNodeForecast(name, part.bytes, capacity, part.holds)
            for name, part, capacity in zip(names, parts, capacities, strict=True)
        ],
    )
    return forecast, (len(plan.missing), next(iter(plan.missing), ""))


def _is_old(facts: WarmupFacts, now: float) -> bool:
    """Return whether a warm-up is no longer remembered: other nodes may have forgotten its end meanwhile."""
    return now - max(facts.begun, facts.at, facts.started, facts.ended) > KEPT_SECONDS


def _state_of(part: WarmupPart) -> tuple[str, str, str]:
    return part.state, part.ring, part.snapshot


def _publisher_rank(node: str, name: str) -> bytes:
    return hashlib.blake2b(f"{name}/{node}".encode(), digest_size=8).digest()


def _load(path: Path) -> dict[int, WarmupFacts]:
    try:
        raw = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, WarmupFacts])
        for name, facts in raw.items():
            WARMUPS.check(name, facts)
        return {int(name): facts for name, facts in raw.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, CachefsError) as error:
        log.warning("%s cannot be used (%s) and is ignored; warmups of the cluster are not resumed", path, error)
        return {}


def _write(path: Path, facts: dict[str, WarmupFacts]) -> None:
    replace_file(path, msgspec.msgpack.encode(facts))
