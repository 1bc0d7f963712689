"""The service: creates, connects, starts, runs and stops its parts."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any, Final

from cachefs.errors import ConfigError
from cachefs_scheduler.api.answers import Answers
from cachefs_scheduler.api.metrics import metrics
from cachefs_scheduler.api.server import Server
from cachefs_scheduler.config import Config, split_address
from cachefs_scheduler.duties import state_file
from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.book import Book
from cachefs_scheduler.duties.cleaning import Cleaning
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.duties.warming import Warmings
from cachefs_scheduler.kube.part import open_part
from cachefs_scheduler.part import Part
from cachefs_scheduler.pauses import Pauses
from cachefs_scheduler.view.asking import Asking
from cachefs_scheduler.view.cluster_view import ClusterView
from cachefs_scheduler.view.following import Following

log = logging.getLogger(__name__)

# Seconds for which node reports are collected before the queue is evaluated, which takes 20 ms per snapshot with 5,000
# nodes.
SETTLE_SECONDS: Final = 0.5
CLEAN_SECONDS: Final = 2.0
SAVE_SECONDS: Final = 2.0
# After a longer downtime, jobs are taken as found.
_LONGEST_PAUSE: Final = 86400.0


class Service:
    """The whole service. Used on the event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._asking = Asking(config.cluster)
        self.view = ClusterView(config)
        seeds = [(host, port + 1) for host, port in map(split_address, config.cluster.nodes)]
        self._following = Following(self.view, self._asking, seeds)
        self.policies = Policies(config)
        self.warmings = Warmings(self.view, self._asking, self._refusal)
        book = Book(config.queue.most_jobs, config.queue.forgotten)
        self.advisor = Advisor(self.view, book, self.policies, self.warmings, config.queue.copy_from)
        self._cleaning = Cleaning(self.view, self.policies, self.warmings, self.advisor.reads)
        answers = Answers(self.view, self.advisor, self.warmings, self._follows)
        self._server = Server(config.service, self.advisor, answers, self._metrics)
        self._parts: list[Part] = []
        if config.kube is not None:
            self._parts.append(open_part(config.kube, self.advisor, self._metrics))
        self._news = asyncio.Event()
        self.view.listeners.append(lambda name: self._news.set())
        self.warmings.ended = lambda one: self._news.set()
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
        self._lock = state_file.lock(directory)
        self._restore(await asyncio.to_thread(state_file.read, directory))
        await self._server.start()
        for part in self._parts:
            await part.start()
        self._tasks = [
            asyncio.create_task(self._endless(work))
            for work in (self._following.run(), self._settle(), self._clean(), self._save())
        ]

    async def stop(self) -> None:
        for part in self._parts:
            await part.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()
        await self.warmings.close()
        await self._asking.close()
        if self._tasks:
            await self._write()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _follows(self) -> str:
        """Return why this replica does not act; "" if it leads or is the only one."""
        return next((why for part in self._parts if (why := part.follows())), "")

    def _refusal(self) -> str:
        """Return why this service sends no commands to nodes; "" if it does."""
        if not self._config.cluster.orders:
            return "cluster.orders is false, so this service gives no orders"
        return self._follows()

    def _metrics(self) -> str:
        return metrics(self.view, self.advisor, self.warmings)

    async def _endless(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            # systemd restarts the service; lost state is requested again.
            log.critical("a part of the service has failed; ending", exc_info=True)
            raise SystemExit(1) from None

    async def _settle(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if not self._follows():
                self.advisor.moves.settle()
                self.advisor.settle()
            await asyncio.sleep(SETTLE_SECONDS)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEAN_SECONDS)
            self.advisor.forget_lapsed()
            self.warmings.drop_lost(time.monotonic())
            self._cleaning.step()
            self.view.forget_unknown({one.snapshot for one in self.advisor.book})
            self._news.set()

    async def _save(self) -> None:
        unsaved = 0.0
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            unsaved += SAVE_SECONDS
            if self.advisor.take_unsaved() or unsaved > 60:
                unsaved = 0.0
                await self._write()

    async def _write(self) -> None:
        now = time.monotonic()
        pieces: list[bytes] = []
        pauses = Pauses()
        # 200,000 reads are 21 MB and 0.4 s of processor time, which would block the interpreter in a thread too.
        for piece in state_file.pieces(time.time(), self.advisor.book, self.policies.said, self.advisor.reads, now):
            pieces.append(piece)
            await pauses.take()
        try:
            await asyncio.to_thread(state_file.write, self._config.service.state_dir, pieces)
            problem = ""
        except OSError as error:
            self.advisor.changed()
            problem = error.strerror or str(error)
        if problem != self._save_problem:  # log changes only, not every two seconds
            self._save_problem = problem
            directory = self._config.service.state_dir
            if problem:
                log.error("%s: the queue cannot be saved: %s", directory, problem)
            else:
                log.warning("%s: the queue is saved again", directory)

    def _restore(self, saved: state_file.Saved) -> None:
        now = time.monotonic()
        elapsed = min(max(0.0, time.time() - saved.written), _LONGEST_PAUSE)
        for job in saved.jobs:
            self.advisor.book.put(state_file.restored_job(job, elapsed, now))
        self.policies.restore(saved.policies)
        for one in saved.reads:
            self.advisor.reads.restore(one.node, one.snapshot, now - one.seconds - elapsed)
        if saved.jobs:
            log.info("%d jobs are known from before", len(saved.jobs))
