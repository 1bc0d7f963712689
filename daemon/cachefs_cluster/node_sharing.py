"""Creates and connects the parts through which a node of a cluster shares state with the others."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cachefs.cluster_messages import MAX_RECEIVED_NODES, NodeCounters, TierUse
from cachefs_cluster.directory.job_shares import SharedJobShares
from cachefs_cluster.directory.shared_consumers import SharedConsumers
from cachefs_cluster.directory.shared_datasets import SharedDatasets
from cachefs_cluster.directory.used_snapshots import LocalDatasets, UsedSnapshots
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.tls import Certificates, member_of, names_of
from cachefs_cluster.section import ClusterSection
from cachefs_cluster.sharing.blobs import SharedBlobs
from cachefs_cluster.sharing.consumers import PublishedConsumers
from cachefs_cluster.sharing.observers import Observers
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.security import ConnectionSecurity
from cachefs_cluster.sharing.snapshot_files import SnapshotFiles
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.fetch.origin_shares import OriginShares
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.runtime.threads import Threads

# Seconds within which other nodes answer with their counters.
COUNTERS_SECONDS: Final = 2.0

CountNode = Callable[[], Coroutine[Any, Any, NodeCounters]]


@dataclass(frozen=True, slots=True)
class SharingContext:
    """The parts of the node, and the settings, that `NodeSharing` uses."""

    section: ClusterSection
    membership: Membership
    # None without TLS.
    certificates: Certificates | None
    # None where nodes do not authenticate each other, or have certificates.
    secret: ClusterSecret | None
    local_datasets: LocalDatasets
    jobs: JobRegistry
    threads: Threads
    # Returns this node's counters, for other nodes.
    own_counters: CountNode
    # What jobs want of origins; None where nothing is fetched.
    shares: OriginShares | None = None


class NodeSharing:
    """Shares state with other nodes. Its attributes are parts for other modules. Used on the event loop."""

    def __init__(self, context: SharingContext) -> None:
        self._context = context
        opened = context.local_datasets.open_snapshots
        section = context.section
        observers = Observers.from_names(section.observers, section.schedulers)
        self.shared = SharedState(
            section.cluster, context.membership, security_of(context.certificates, context.secret), observers
        )
        self.blobs = SharedBlobs(self.shared, context.threads)
        self.consumers = PublishedConsumers(self.shared, self.blobs)
        self.files = SnapshotFiles(
            self.shared, lambda one: opened.path(one) if opened.get(one) is not None else None, context.threads
        )
        self.datasets = SharedDatasets(
            self.shared, self.files, context.local_datasets, lambda one: self.used.is_transferring(one)
        )
        self.used = UsedSnapshots(self.shared, self.files, context.local_datasets, self.datasets.is_coming)
        self.shared.serve_counters(self._own_counters)
        self._jobs = SharedConsumers(context.jobs, self.shared, self.blobs)
        self._background = [self.datasets.run, self.used.run, self._jobs.run]
        if context.shares is not None:
            self._background.append(SharedJobShares(context.jobs, context.shares, self.shared).run)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises CachefsError."""
        host, port = self._context.section.listen_addresses[0]
        await self.datasets.start()
        self.used.start()
        await self.shared.start(host, port + 1)
        self._tasks = [asyncio.create_task(run()) for run in self._background]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.files.close()
        await self.shared.stop()

    def is_coming(self, snapshot_id: str) -> bool:
        """Return whether a snapshot is on its way to this node, as far as is known."""
        return self.datasets.is_coming(snapshot_id) or self.used.is_coming(snapshot_id)

    @property
    def is_behind(self) -> bool:
        """Whether published state of other nodes is not followed yet, or a snapshot is on its way here."""
        return self.datasets.is_catching_up or self.used.is_catching_up

    def problems(self) -> list[str]:
        """Return the errors of the cluster's datasets on this node, a line each."""
        return [*self.datasets.problems(), *self.used.problems()]

    async def counters(self) -> dict[str, NodeCounters]:
        """Return counters of all nodes by id, this one included; for a node that does not answer, the reason."""
        found = {self._context.membership.view.me: await self._context.own_counters()}
        for node, response in (await self.shared.node_counters(COUNTERS_SECONDS)).items():
            found[node] = _decode_counters(response)
        return found

    async def _own_counters(self) -> bytes:
        return msgspec.msgpack.encode(await self._context.own_counters())


def _decode_counters(response: bytes | PeerFailed) -> NodeCounters:
    if isinstance(response, PeerFailed):
        return NodeCounters(problem=str(response))
    try:
        return msgspec.msgpack.decode(response, type=NodeCounters)
    except msgspec.MsgspecError as error:
        return NodeCounters(problem=f"its response is invalid: {error}")


def security_of(certificates: Certificates | None, secret: ClusterSecret | None = None) -> ConnectionSecurity:
    """Return the connection security that these certificates, or this secret, give."""
    if certificates is None:
        return ConnectionSecurity(secret=secret)
    return ConnectionSecurity(
        certificates.server_context, certificates.client_context, _certificate_problem, _certificate_names
    )


def _certificate_names(ssl_object: Any) -> frozenset[str]:
    return names_of(ssl_object.getpeercert()) if ssl_object is not None else frozenset()


def _certificate_problem(ssl_object: Any, node: NodeRecord | None) -> str:
    names = _certificate_names(ssl_object)
    shown = ", ".join(sorted(names))[:100] or "no name"
    if node is not None and member_of(names, [node]) is None:
        return f"its certificate is that of {shown}, and not of {node.name}"
    return "" if names else "it has no certificate"


def counters_of(
    started: float,
    usage: list[TierUse],
    jobs: JobRegistry,
    fetched: tuple[int, int],
    problems: list[str],
    received: Mapping[str, int],
) -> NodeCounters:
    """Create this node's counters. fetched: blocks and bytes from origins. started: monotonic seconds. received: by
    node."""
    givers = sorted(received.items(), key=lambda each: -each[1])[:MAX_RECEIVED_NODES]
    running = [job for job in jobs if job.state == JobState.RUNNING]
    return NodeCounters(
        uptime=time.monotonic() - started,
        tiers=usage,
        jobs=len(running),
        consumers=len(jobs.consumers),
        origin_blocks=fetched[0],
        origin_bytes=fetched[1],
        problems=problems,
        received={node: count for node, count in givers if count},
    )
