"""The troubles of the node: one list, derived from the state of its parts, for every place that shows it.

`Troubles` keeps the list for CACHE_SECONDS, so the parts are examined twice a second at most, however many ask.
Reading costs nothing extra: no counting or bookkeeping happens where reads are answered.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from cachefs.errors import OriginAccessDenied
from cachefs.messages import EndpointStatus, Stall, Trouble
from cachefs.sizes import format_size
from cachefs.trouble_texts import Cause, filter_by_snapshots, is_failing, sort_by_severity
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.waiting_reads import (
    LATE_PUBLICATION_SECONDS,
    AttributeReads,
    ReadAttribution,
    ReadFailure,
    WaitingRead,
)
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.ports import AwayNode
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.store.storage import TierUsage

# A tier always keeps a little of its budget back.
_FULL_FRACTION: Final = 0.95
# A tier that was full remains so until it uses less than this part of its limit: it evicts a whole segment at once.
_STILL_FULL_FRACTION: Final = 0.5
# Seconds that a read has waited when it becomes a trouble.
NOTICE_SECONDS: Final = 3.0
# Seconds for which failed reads are a trouble of the node. A job shows the failures of its whole time.
RECENT_SECONDS: Final = 60.0
# Seconds for which the list is kept, and its largest length.
CACHE_SECONDS: Final = 0.5
MAX_TROUBLES: Final = 32

_NO_JOB: Final = ReadAttribution(None, is_sure=False)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TierTrouble:
    """A present trouble of one tier."""

    tier: str
    # Its kind; its text; and unix time in seconds of the first look that found it.
    kind: str
    text: str
    since: float


class TierTroubles:
    """Adds each trouble to the log of failures once, and keeps it current while it lasts. Used on the event loop."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._known: dict[str, TierTrouble] = {}  # by tier

    @property
    def current(self) -> list[TierTrouble]:
        """The troubles that the last look found."""
        return list(self._known.values())

    def check_tiers(self, tiers: Iterable[TierUsage]) -> None:
        """Check the tiers. Call every second or so."""
        for tier in tiers:
            before = self._known.pop(tier.name, None)
            kind, text = trouble_of(tier, _STILL_FULL_FRACTION if before is not None else _FULL_FRACTION)
            if not kind:
                continue
            subject = f"{tier.name} tier"
            if before is not None and before.kind == kind:
                self._errors.note_ongoing(subject)
            else:
                self._errors.add(subject, text)
            since = before.since if before is not None else time.time()
            self._known[tier.name] = TierTrouble(tier.name, kind, text, since)


def trouble_of(tier: TierUsage, full: float = _FULL_FRACTION) -> tuple[str, str]:
    """Return the kind of trouble and its text; both "" where there is none. full: the part of its limit that a full
    tier uses."""
    if tier.problem:
        return tier.problem, f"takes no new blocks: {tier.problem}"
    if tier.limit < _FULL_FRACTION * tier.budget and tier.used >= full * tier.limit:
        return "full", (
            f"has no more room: {format_size(max(0, tier.limit))} of its budget of {format_size(tier.budget)} can be "
            f"used, as other programs have taken the rest of the file system of {tier.directory}"
        )
    return "", ""


@dataclass(frozen=True, slots=True)
class ServerWithDatasets:
    """An origin server that has datasets."""

    endpoint: Endpoint
    status: EndpointStatus
    # Ids of the snapshots of the server's datasets.
    snapshots: list[str]


@dataclass(frozen=True, slots=True)
class TroubleInputs:
    """The state of the node's parts. Times are unix times in seconds, except those of waiting reads, in loop time."""

    servers: Sequence[ServerWithDatasets]
    # Reads that have waited for NOTICE_SECONDS or longer, and the loop time now.
    reads: Sequence[WaitingRead]
    loop_now: float
    failures: Sequence[ReadFailure]
    nodes: Sequence[AwayNode]
    tiers: Sequence[TierTrouble]
    # By id of a snapshot: its dataset.
    datasets: dict[str, str]


def derive_troubles(inputs: TroubleInputs, now: float) -> list[Trouble]:
    """Return all troubles, the worst first, including old failures. now: unix time in seconds."""
    servers = {id(one.endpoint): one for one in inputs.servers}
    away = {node.name for node in inputs.nodes}
    waiting: dict[tuple[Cause, str], list[WaitingRead]] = {}
    for read in inputs.reads:
        waiting.setdefault(_cause_of(read, servers.get(id(read.endpoint)), away, inputs.datasets), []).append(read)
    troubles = [
        *(_silent_server_trouble(one, waiting.pop((Cause.ORIGIN, one.status.name), []), inputs.loop_now, now)
          for one in inputs.servers if one.status.silent),
        *(_failed_reads_trouble(one, inputs.datasets, now) for one in inputs.failures),
        *(_away_node_trouble(node, waiting.pop((Cause.PEER, node.name), []), inputs.loop_now, now)
          for node in inputs.nodes),
        *(Trouble(Cause.TIER, tier.tier, tier.since, now, tier.text) for tier in inputs.tiers),
    ]  # fmt: skip
    for (cause, subject), reads in waiting.items():
        known = next((at for at, one in enumerate(troubles) if (one.cause, one.subject) == (cause, subject)), None)
        if known is not None:
            troubles[known] = _with_reads(troubles[known], reads, inputs.loop_now)
        else:
            server = servers.get(id(reads[0].endpoint))
            one = Trouble(cause, subject, now, now, _reason(cause, reads, server))
            troubles.append(_with_reads(one, reads, inputs.loop_now, begins=True))
    return sort_by_severity(troubles)[:MAX_TROUBLES]


def _cause_of(
    read: WaitingRead, server: ServerWithDatasets | None, away: Collection[str], datasets: dict[str, str]
) -> tuple[Cause, str]:
    """Return the cause for which a read waits, and its subject. away: names of the nodes that do not answer."""
    if isinstance(read.trouble, OriginAccessDenied):
        return Cause.REFUSED, datasets.get(read.snapshot, read.snapshot[:12])
    name = server.status.name if server is not None else read.endpoint.name
    if server is not None and server.status.silent:
        return Cause.ORIGIN, name
    if read.peers:
        return Cause.PEER if read.peers[0] in away else Cause.SLOW_PEER, read.peers[0]
    # A read that has failed pauses until its next attempt, and waits for no slot.
    is_throttled = server is not None and server.status.width < server.status.most
    has_failed = read.trouble is not None and not is_throttled
    return (Cause.SLOW if read.has_permit or has_failed else Cause.SLOT), name


def _reason(cause: Cause, reads: Sequence[WaitingRead], server: ServerWithDatasets | None) -> str:
    reason = next((str(read.trouble) for read in reads if read.trouble is not None), "")
    if cause is Cause.SLOT and server is not None:
        width = f"it gets {server.status.width} of {server.status.most} requests at once"
        return f"{width}: {reason}" if reason else width
    return reason


def _with_reads(one: Trouble, reads: Sequence[WaitingRead], loop_now: float, *, begins: bool = False) -> Trouble:
    """Add the reads that wait for the trouble. begins: the trouble began when the first of them began to wait."""
    if not reads:
        return one
    longest = loop_now - min(read.since for read in reads)
    return msgspec.structs.replace(
        one,
        since=one.since - longest if begins else one.since,
        waiting=len(reads),
        longest=longest,
        snapshots=list(dict.fromkeys([*one.snapshots, *(read.snapshot for read in reads)])),
    )


def _silent_server_trouble(
    server: ServerWithDatasets, reads: Sequence[WaitingRead], loop_now: float, now: float
) -> Trouble:
    status = server.status
    one = Trouble(
        Cause.ORIGIN, status.name, now - status.silent, now - status.last_asked, status.reason,
        snapshots=server.snapshots,
    )  # fmt: skip
    return _with_reads(one, reads, loop_now)


def _failed_reads_trouble(one: ReadFailure, datasets: dict[str, str], now: float) -> Trouble:
    name = datasets.get(one.snapshot, one.snapshot[:12])
    return Trouble(one.cause, name, one.first, one.last, one.message, failed=one.waited, snapshots=[one.snapshot])


def _away_node_trouble(one: AwayNode, reads: Sequence[WaitingRead], loop_now: float, now: float) -> Trouble:
    return _with_reads(Trouble(Cause.PEER, one.name, one.since or now, now, one.reason), reads, loop_now)


def without_old_failures(troubles: Iterable[Trouble], now: float) -> list[Trouble]:
    """Return the troubles without failures older than RECENT_SECONDS."""
    return [one for one in troubles if not is_failing(one.cause) or one.waiting or now - one.last < RECENT_SECONDS]


class CachedValue(Generic[Value]):
    """Caches a value for CACHE_SECONDS. Used on the event loop."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._made: tuple[float, Value] | None = None  # monotonic seconds, and the value

    def get(self, *, fresh: bool = False) -> Value:
        """Return the value. fresh: make it anew."""
        now = time.monotonic()
        if fresh or self._made is None or now - self._made[0] >= CACHE_SECONDS:
            self._made = now, self._make()
        return self._made[1]


class NodeExamination:
    """Examines the parts of the node for troubles, and for reads that wait. Used on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        fetcher: Fetcher,
        errors: ErrorLog,
        away_nodes: Callable[[float], Iterable[AwayNode]],
    ) -> None:
        """away_nodes: returns the nodes of the cluster that are not asked, or send no heartbeat, at a loop time."""
        self._catalog = catalog
        self._fetcher = fetcher
        self._tiers = TierTroubles(errors)
        self._away_nodes = away_nodes

    def check_tiers(self, tiers: Iterable[TierUsage]) -> None:
        """Examine the tiers, some of which may have got a problem, or have none any more."""
        self._tiers.check_tiers(tiers)

    def examine(self) -> TroubleInputs:
        """Return the state of the parts."""
        now = asyncio.get_running_loop().time()
        servers: dict[int, ServerWithDatasets] = {}
        datasets: dict[str, str] = {}
        for dataset in self._catalog:
            endpoint, known = dataset.origin.endpoint, [snapshot.id for snapshot in dataset.record.snapshots]
            datasets |= dict.fromkeys(known, dataset.record.name)
            if id(endpoint) not in servers:  # many datasets may share one, and its status takes a microsecond
                servers[id(endpoint)] = ServerWithDatasets(endpoint, endpoint.status(), [])
            servers[id(endpoint)].snapshots.extend(known)
        return TroubleInputs(
            servers=list(servers.values()),
            reads=self._fetcher.waiting_reads(now - NOTICE_SECONDS),
            loop_now=now,
            failures=self._fetcher.failures.latest_first(),
            nodes=list(self._away_nodes(now)),
            tiers=self._tiers.current,
            datasets=datasets,
        )

    def waiting_stalls(self) -> list[Stall]:
        """Return the reads of this node that wait now."""
        now = asyncio.get_running_loop().time()
        return [
            Stall(one.key, now - one.since, f"peer {one.peers[0]}" if one.peers else "origin")
            for one in self._fetcher.waiting_reads(now)
            if not one.is_for_peer
        ]


class Troubles:
    """Keeps the list of the node's troubles. Used on the event loop."""

    def __init__(
        self,
        examine: Callable[[], TroubleInputs],
        attribute: AttributeReads = lambda snapshot, keys: [_NO_JOB] * len(keys),
        share_troubles: Callable[[str], Sequence[Trouble]] = lambda job: (),
    ) -> None:
        """examine: examines the parts of the node; attribute: returns the jobs of failed reads; share_troubles: returns
        the troubles of a job with the origins that it shares."""
        self._share_troubles = share_troubles
        self._examine = examine
        self._attribute = attribute
        self._cached = CachedValue(self._find_troubles)
        # By cause and subject of the present troubles: when each was first seen.
        self._since: dict[tuple[str, str], float] = {}
        self._failures: dict[tuple[str, str], ReadFailure] = {}  # by cause and snapshot

    def _find_troubles(self) -> list[Trouble]:
        parts = self._examine()
        for failure in parts.failures:
            failure.attribute(self._attribute, time.time() - LATE_PUBLICATION_SECONDS)
        self._failures = {(one.cause, one.snapshot): one for one in parts.failures}
        found, before = derive_troubles(parts, time.time()), self._since
        keys = [(one.cause, one.subject) for one in found]
        self._since = {
            key: min(one.since, before.get(key, one.since)) for key, one in zip(keys, found, strict=True)
        }  # fmt: skip
        return [msgspec.structs.replace(one, since=self._since[key]) for key, one in zip(keys, found, strict=True)]

    def all_troubles(self, *, fresh: bool = False) -> list[Trouble]:
        """Return all troubles, the worst first, including old failures. fresh: as they are now."""
        return self._cached.get(fresh=fresh)

    def present_troubles(self) -> list[Trouble]:
        """Return the present troubles, the worst first."""
        return without_old_failures(self.all_troubles(), time.time())

    def troubles_of(self, job: str, snapshots: Sequence[str], began: float, *, fresh: bool = False) -> list[Trouble]:
        """Return the troubles of *job*, which has read *snapshots* since *began* (unix time in seconds): its reads that
        have failed since then, and failed reads that may be its own. fresh: as they are now."""
        troubles = self.all_troubles(fresh=fresh)
        if fresh:  # the job ends
            for failure in self._failures.values():
                if failure.snapshot in snapshots:  # other jobs that have read these blocks may still be published
                    failure.attribute(self._attribute, time.time())
        found = [one for one in filter_by_snapshots(troubles, snapshots) if one.last >= began]
        own = [each for one in found if (each := self._as_job_trouble(one, job, began)) is not None]
        shares = self._share_troubles(job)
        return sort_by_severity([*own, *shares]) if shares else own

    def _as_job_trouble(self, one: Trouble, job: str, began: float) -> Trouble | None:
        """Return the trouble as the job has it; None where it is only that of other jobs."""
        known = self._failures.get((one.cause, one.snapshots[0])) if one.failed else None
        if known is None:
            return one
        own, unattributed = known.reads_of_job(job, began)
        is_ahead = known.ahead > 0 and known.ahead >= began
        if not own and not unattributed and not is_ahead:
            return msgspec.structs.replace(one, failed=0) if one.waiting else None
        shown = (own or unattributed)[-1:]
        is_all = len(own) == len(known.reads) and began <= known.first
        return msgspec.structs.replace(
            one,
            failed=known.waited if is_all else len(own) + len(unattributed),
            unattributed=len(unattributed),
            last=max([known.ahead, *(read.when for read in shown)]),
            reason=shown[0].message if shown else one.reason,
        )
