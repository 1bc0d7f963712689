"""Follows the pods of a cluster, and does what is due for their jobs: opens gates, writes events, tells Advice."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs_scheduler.advice import Advice
from cachefs_scheduler.kube.api import Changed, KubernetesApi
from cachefs_scheduler.kube.gangs import Gangs
from cachefs_scheduler.kube.leader import Leader
from cachefs_scheduler.kube.notes import Note, Sieve
from cachefs_scheduler.kube.pod_job import GATE
from cachefs_scheduler.kube.pod_watch import PodWatch
from cachefs_scheduler.kube.reconcile import Jobs, OpenGate
from cachefs_scheduler.kube.wire import Pod

log = logging.getLogger(__name__)

# Seconds between two looks at what is due though nothing has changed; and at least between any two, so that a job with
# a thousand pods is told of a few times and not a thousand times.
LOOK_SECONDS: Final = 5.0
BREATH_SECONDS: Final = 0.05
# Seconds without an API server, or without a replica that leads, after which no pod gets a gate any more.
GIVEN_UP: Final = 60.0
# Calls to the API server at the same time.
_AT_ONCE: Final = 8


class Following:
    """Used on the event loop."""

    def __init__(self, api: KubernetesApi, advice: Advice, gangs: Gangs, names: tuple[str, str, str]) -> None:
        """names: of the Lease, of this replica, and the label selector of pods."""
        lease, self._identity, selector = names
        self._api = api
        self._advice = advice
        self._jobs = Jobs(advice, gangs)
        self._sieve = Sieve()
        self._wake = asyncio.Event()
        self.watch = PodWatch(api, selector, self)
        self.leader = Leader(api, lease, self._identity, self._leader_changed, self._is_able)
        self._tasks: list[asyncio.Task[None]] = []
        self._limit = asyncio.Semaphore(_AT_ONCE)
        # When all was well last, and when pods were followed.
        self._well = self._followed = time.monotonic()
        self.opened = 0
        self.noted = 0

    def __len__(self) -> int:
        """How many pods are followed."""
        return len(self._jobs)

    @property
    def leads(self) -> bool:
        return self.leader.leads

    @property
    def problem(self) -> str:
        """Why pods are not followed now; empty where they are."""
        return self.watch.problem

    @property
    def opens(self) -> bool:
        """Is a gate that a pod gets now opened in time, by this replica or another one?"""
        return not self.is_broken and time.monotonic() - self._well < GIVEN_UP

    @property
    def is_broken(self) -> bool:
        """Has a task ended that never should?"""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        self._unsubscribe = self._advice.subscribe(self._admissions_changed)
        for work in (self.watch.run(), self.leader.run(), self._act()):
            self._tasks.append(asyncio.create_task(_kept(work)))

    async def stop(self) -> None:
        if self._tasks:
            self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()

    # --- what the watch tells ----------------------------------------------------------------------------------------

    def listed(self, pods: list[Pod]) -> None:
        self._jobs.listed(pods, time.monotonic())
        self._wake.set()

    def changed(self, pod: Pod) -> None:
        self._jobs.changed(pod, time.monotonic())
        self._wake.set()

    def removed(self, uid: str) -> None:
        self._jobs.removed(uid, time.monotonic())
        self._wake.set()

    def _admissions_changed(self) -> None:
        self._jobs.admissions_changed()
        self._wake.set()

    def _leader_changed(self) -> None:
        if self.leader.leads:
            self._jobs.begin(time.monotonic())
            self._wake.set()

    def _is_able(self) -> bool:
        return not self.is_broken and time.monotonic() - self._followed < GIVEN_UP

    # --- what is done ------------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            await asyncio.sleep(BREATH_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            if not self.problem:
                self._followed = now
                self._well = now if self.leader.is_held else self._well
            if not self.leader.leads:
                self._jobs.drop_ended(now)
                continue
            if self.watch.problem:
                continue
            try:
                due = self._jobs.due(now)
            except Exception as error:
                log.error("internal error; gates that are closed stay so until this is mended", exc_info=error)
                continue
            if due.more:
                self._wake.set()
            notes = [note for note in due.notes if self._sieve.passes(note, now)]
            await asyncio.gather(*map(self._open, due.gates), *map(self._write, notes))

    async def _open(self, gate: OpenGate) -> None:
        async with self._limit:
            if not self.leader.leads:
                return
            try:
                await self._api.open_gate(gate.pod, gate.index, GATE)
                self.opened += 1
            except Changed:
                log.info(
                    "pod %s/%s has changed meanwhile; its gate is looked at again", gate.pod.namespace, gate.pod.name
                )
            except CachefsError as error:
                log.warning("the gate of pod %s/%s is not open yet: %s", gate.pod.namespace, gate.pod.name, error)
                self._jobs.not_opened(gate.pod.uid, time.monotonic())

    async def _write(self, note: Note) -> None:
        async with self._limit:
            try:
                await self._api.note(note, uuid.uuid4().hex[:16], self._identity)
                self.noted += 1
            except CachefsError as error:
                log.info("no event for pod %s/%s: %s", note.pod.namespace, note.pod.name, error)


async def _kept(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:
        # The extender goes on. A liveness probe that fails starts all again.
        log.critical("internal error; this replica follows pods no more", exc_info=error)
        raise
