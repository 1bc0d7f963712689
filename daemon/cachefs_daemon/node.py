"""The node: creates, connects, starts, maintains and stops every part of the daemon."""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cachefs.block import MEMORY, SSD
from cachefs.errors import CachefsError
from cachefs.messages import WarmupProgress
from cachefs_daemon.config import Config
from cachefs_daemon.content.content_parts import ContentParts
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.fetch.fetch_parts import SourceLookups
from cachefs_daemon.fetch.fetching import Fetching
from cachefs_daemon.jobs.job_parts import JobParts
from cachefs_daemon.jobs.process_reads import ProcessReads
from cachefs_daemon.local_reads import LocalReads
from cachefs_daemon.lookahead import LookaheadParts, NodeLookahead
from cachefs_daemon.mounts.persistence import MountPersistence
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.node_cluster import NO_CLUSTER, AdoptConnection, Cluster, NodeParts
from cachefs_daemon.origin_settings import origin_settings
from cachefs_daemon.reporting.residency import Residency
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage
from cachefs_daemon.troubles import CachedValue, NodeExamination, Troubles

MAINTENANCE_SECONDS: Final = 2.0
# Mounts report at least every 10 s. Before all have, it is unknown which snapshots they use.
PRUNE_AFTER: Final = 30.0


class Node:
    """The parts of the daemon, connected. Used on the event loop.

    The attributes are for the service, which answers calls with them. A part receives the other parts that it needs
    when it is created.
    """

    def __init__(
        self, config: Config, storage: Storage, threads: Threads, errors: ErrorLog, cluster: Cluster = NO_CLUSTER
    ) -> None:
        """Raises CachefsError."""
        self.config = config
        self.storage = storage
        self.threads = threads
        self.instance = uuid.uuid4().hex  # changes with every start of the daemon
        self.started, self.began = time.monotonic(), time.time()
        self.errors = errors
        self.cluster = cluster
        state_dir = config.daemon.state_dir
        snapshots = OpenSnapshots(state_dir / "snapshots", config.daemon.block_size)
        self.catalog = Catalog(state_dir, snapshots, origin_settings(config), threads, cluster.directory)
        plan = storage.planning.plan
        sources = SourceLookups(
            snapshots.block_source,
            snapshots.renew_source,
            self.catalog.is_replaced,
            lambda source: plan.job_of_next_read(source.snapshot, source.key),
        )
        self.fetching = Fetching(config, storage, sources, cluster.make_block_peers, threads, errors)
        self.fetcher = self.fetching.fetcher
        self.content = ContentParts(self.catalog, storage, self.fetcher, threads, cluster.directory, state_dir)
        self.mounts = MountRegistry(self.instance, cluster.directory.note_reads_changed)
        self._mount_persistence = MountPersistence(self.mounts, state_dir, threads)
        jobs = JobParts(config, self.catalog, storage, self.fetcher, threads, cluster.placement)
        self.jobs, self._job_persistence = jobs.registry, jobs.persistence
        self.process_reads = ProcessReads()
        self._reads = LocalReads(self.mounts, self.jobs, self.content.warmups, self.catalog, cluster.directory)
        self.lookahead = NodeLookahead(
            config,
            LookaheadParts(
                storage, threads, self.catalog, snapshots, self.fetching, self.mounts, jobs, cluster.placement
            ),
        )
        self._examination = NodeExamination(self.catalog, self.fetcher, errors, cluster.away_nodes)
        shares = self.lookahead.shares
        self.troubles = Troubles(self._examination.examine, jobs.attribution.attribute_failed_reads, shares.troubles_of)
        waiting = CachedValue(lambda: jobs.attribution.waiting_rows(self._examination.waiting_stalls()))
        self.jobs.report_troubles_of(self.troubles, waiting.get, shares.shares_of)
        self.residency = Residency(storage.index, storage.tiering, storage.planning.presence, plan)
        cluster.attach(
            NodeParts(
                instance=self.instance,
                started=self.started,
                storage=storage,
                threads=threads,
                errors=errors,
                catalog=self.catalog,
                snapshots=snapshots,
                content=self.content,
                fetcher=self.fetcher,
                jobs=self.jobs,
                shares=shares,
                loader=jobs.loader,
                residency=self.residency,
                reads=self._reads,
                mount_reads=self.mounts.read_counts,
                copy_window=lambda: self.lookahead.copy_window,
                fetches_ahead=config.prefetch.enabled,
            )
        )
        self._background_work: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._job_persistence.run,
            self._mount_persistence.run,
            self.content.warmup_persistence.run,
            *self.lookahead.background_work,
            *cluster.background_work,
        ]
        self._background: list[asyncio.Task[None]] = []

    def use_config(self, config: Config) -> None:
        """Use another configuration, which differs in settings that can change while the node runs."""
        self.config = config

    def open_peer_servers(self, adopt: AdoptConnection) -> None:
        """Listen for other nodes, where the node is in a cluster. Call before `start`. adopt: serves a connection of
        the fetch channel. Raises ConfigError."""
        tiers = {usage.name: usage.directory for usage in self.storage.usage()}
        self.cluster.open_servers(self.storage.index.path, tiers, adopt)

    async def start(self) -> None:
        """Restore the state of the previous daemon, and begin to work."""
        await self._mount_persistence.restore()
        await self.content.apply_records()
        await self._job_persistence.restore()
        await self.cluster.start()
        await self.content.warmup_persistence.restore()
        self._background = [asyncio.create_task(run()) for run in self._background_work]

    def warmups(self) -> list[WarmupProgress]:
        """Return the progress of the warmups of this node and of the cluster, oldest first."""
        shared = self.cluster.warmups
        return [*(run.progress() for run in self.content.warmups if run.id not in shared), *shared.progress()]

    async def maintain(self) -> None:
        """Run as long as the daemon. Each step repeats on its own, so that limits are enforced in time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self._forget_ended))
            group.create_task(self._repeat(self._check_snapshots))
            group.create_task(self._repeat(self._check_tiers))
            for each in self._upkeep():
                group.create_task(self._repeat(functools.partial(self.threads.upkeep, each)))

    def _upkeep(self) -> list[Callable[[], None]]:
        """Return the steps of the upkeep in threads, each on its own: a disk that hangs holds up one of them."""
        maintenance = self.storage.maintenance
        for_tiers = (maintenance.enforce_limit, maintenance.retry_tier)
        by_tier = [functools.partial(step, tier) for step in for_tiers for tier in (MEMORY, SSD)]
        return [*by_tier, maintenance.enforce_quotas, maintenance.compact, *self.cluster.upkeep]

    async def _repeat(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(MAINTENANCE_SECONDS)
            try:
                await step()
            except CachefsError as error:
                self.errors.add("maintenance", str(error))
            except Exception as error:
                self.errors.add("maintenance", f"internal error ({error!r})", bug=error)

    async def _forget_ended(self) -> None:
        self.lookahead.dispatcher.forget_ended()
        await self.jobs.end_gone()
        if time.monotonic() - self.started > PRUNE_AFTER:
            await self.catalog.forget_unused(self._reads.may_be_read)

    async def _check_tiers(self) -> None:
        self._examination.check_tiers(self.storage.usage())
        self.troubles.all_troubles()  # records since when each trouble exists

    async def _check_snapshots(self) -> None:
        for problem in await self.catalog.check_files():
            self.errors.add("snapshots", problem)

    async def stop_background(self) -> None:
        """Cancel work that has no caller; calls still get their responses."""
        await self.cluster.leave()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.cluster.close()
        self.lookahead.pushers.close()
        await self.content.warmups.close()
        await self.jobs.close()

    async def stop(self) -> None:
        """Stop the node. No call may be in progress any more."""
        await self.cluster.close()
        await self.fetching.close()
        await self.catalog.close()
