"""The service: creates, connects, starts, runs and stops its parts."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any, Final

from cachefs.errors import ConfigError
from cachefs_scheduler.advisor_interface import SchedulerIntegration
from cachefs_scheduler.api.handlers import ApiHandlers, YieldPoints
from cachefs_scheduler.api.metrics import metrics_page
from cachefs_scheduler.api.server import SchedulerApiServer
from cachefs_scheduler.config import SchedulerConfig, split_address
from cachefs_scheduler.duties import state_file
from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.job_table import JobTable
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.duties.policies import CopyCleaner, Policies
from cachefs_scheduler.kube.integration import open_integration
from cachefs_scheduler.view.daemon_follower import DaemonFollower
from cachefs_scheduler.view.observer_client import ObserverClient
from cachefs_scheduler.view.reported_cluster import ReportedCluster

log = logging.getLogger(__name__)

# Seconds for which node reports are collected before the queue is evaluated, which takes 20 ms per snapshot with 5,000
# nodes.
EVALUATE_SECONDS: Final = 0.5
CLEAN_SECONDS: Final = 2.0
SAVE_SECONDS: Final = 2.0
# After a longer downtime, jobs are taken as found.
_MAX_DOWNTIME: Final = 86400.0


class SchedulerService:
    """The whole service. Used on the event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._client = ObserverClient(config.cluster)
        self.view = ReportedCluster(config)
        seeds = [(host, port + 1) for host, port in map(split_address, config.cluster.nodes)]
        self._follower = DaemonFollower(self.view, self._client, seeds)
        self.policies = Policies(config)
        self.warmups = NodeWarmups(self.view, self._client, self._reason_to_send_nothing)
        book = JobTable(config.queue.most_jobs, config.queue.forgotten)
        self.advisor = Advisor(self.view, book, self.policies, self.warmups, config.queue.copy_from)
        self._cleaner = CopyCleaner(self.view, self.policies, self.warmups, self.advisor.reads)
        handlers = ApiHandlers(self.view, self.advisor, self.warmups, self._reason_not_leading)
        self._server = SchedulerApiServer(config.service, self.advisor, handlers, self._metrics)
        self._integrations: list[SchedulerIntegration] = []
        if config.kube is not None:
            self._integrations.append(open_integration(config.kube, self.advisor, self._metrics))
        self._wakeup = asyncio.Event()
        self.view.listeners.append(lambda name: self._wakeup.set())
        self.warmups.add_end_listener(lambda one: self._wakeup.set())
        self._tasks: list[asyncio.Task[None]] = []
        self._lock: int | None = None
        self._save_problem = ""

    async def start(self) -> None:
        """Restore the previous service's state, and start. Raises CachefsError."""
        directory = self._config.service.state_dir
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"service.state_dir = {str(directory)!r}: {error.strerror}") from None
        self._lock = state_file.lock_directory(directory)
        self._restore(await asyncio.to_thread(state_file.read_state, directory))
        await self._server.start()
        for part in self._integrations:
            await part.start()
        self._tasks = [
            asyncio.create_task(self._run_task(work))
            for work in (self._follower.run(), self._evaluate_forever(), self._clean_forever(), self._save_forever())
        ]

    async def stop(self) -> None:
        for part in self._integrations:
            await part.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()
        await self.warmups.close()
        await self._client.close()
        if self._tasks:
            await self._write_state()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _reason_not_leading(self) -> str:
        """Return why this replica does not act; "" if it leads or is the only one."""
        return next((why for part in self._integrations if (why := part.reason_not_leading())), "")

    def _reason_to_send_nothing(self) -> str:
        """Return why this service sends no commands to nodes; "" if it does."""
        if not self._config.cluster.orders:
            return "cluster.orders is false, so this service sends no commands"
        return self._reason_not_leading()

    def _metrics(self) -> str:
        return metrics_page(self.view, self.advisor, self.warmups)

    async def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            # systemd restarts the service; lost state is requested again.
            log.critical("a part of the service has failed; ending", exc_info=True)
            raise SystemExit(1) from None

    async def _evaluate_forever(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if not self._reason_not_leading():
                self.advisor.moves.evict_left_nodes()
                self.advisor.evaluate_queue()
            await asyncio.sleep(EVALUATE_SECONDS)

    async def _clean_forever(self) -> None:
        while True:
            await asyncio.sleep(CLEAN_SECONDS)
            self.advisor.forget_lapsed()
            self.warmups.drop_lost(time.monotonic())
            self._cleaner.clean_next()
            self.view.forget_unknown({job.snapshot for job in self.advisor.jobs})
            self._wakeup.set()

    async def _save_forever(self) -> None:
        unsaved = 0.0
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            unsaved += SAVE_SECONDS
            if self.advisor.pop_unsaved() or unsaved > 60:
                unsaved = 0.0
                await self._write_state()

    async def _write_state(self) -> None:
        now = time.monotonic()
        pieces: list[bytes] = []
        pauses = YieldPoints()
        # 200,000 reads are 21 MB and 0.4 s of processor time, which would block the interpreter in a thread too.
        for piece in state_file.state_pieces(
            time.time(), self.advisor.jobs, self.policies.overrides, self.advisor.reads, now
        ):
            pieces.append(piece)
            await pauses.yield_if_due()
        try:
            await asyncio.to_thread(state_file.write_state, self._config.service.state_dir, pieces)
            problem = ""
        except OSError as error:
            self.advisor.mark_unsaved()
            problem = error.strerror or str(error)
        if problem != self._save_problem:  # log changes only, not every two seconds
            self._save_problem = problem
            directory = self._config.service.state_dir
            if problem:
                log.error("%s: the queue cannot be saved: %s", directory, problem)
            else:
                log.warning("%s: the queue is saved again", directory)

    def _restore(self, saved: state_file.SavedState) -> None:
        now = time.monotonic()
        elapsed = min(max(0.0, time.time() - saved.written), _MAX_DOWNTIME)
        for job in saved.jobs:
            self.advisor.jobs.add_job(state_file.restored_job(job, elapsed, now))
        self.policies.restore(saved.policies)
        for read in saved.reads:
            self.advisor.reads.restore(read.node, read.snapshot, now - read.seconds - elapsed)
        if saved.jobs:
            log.info("restored %d jobs from the state file", len(saved.jobs))
