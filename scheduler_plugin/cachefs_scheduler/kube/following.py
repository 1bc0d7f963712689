"""Follows the pods of a cluster and acts for their jobs: opens gates, writes events, informs Advice."""

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

# Longest and shortest pause between two passes over pending work, in seconds. The shortest pause groups changes: a job
# with a thousand pods causes a few passes, not a thousand.
LOOK_SECONDS: Final = 5.0
BREATH_SECONDS: Final = 0.05
# Seconds without an API server or a leading replica after which pods get no more gates.
GIVEN_UP: Final = 60.0
# Concurrent calls to the API server.
_AT_ONCE: Final = 8


class Following:
    """The Kubernetes controller of one replica. Used on the event loop."""

    def __init__(self, api: KubernetesApi, advice: Advice, gangs: Gangs, names: tuple[str, str, str]) -> None:
        """names: the Lease's name, this replica's identity, and the label selector of pods."""
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
        # Monotonic times when a replica last led and pods were followed, and when pods were last followed.
        self._well = self._followed = time.monotonic()
        self.opened = 0
        self.noted = 0

    def __len__(self) -> int:
        """Return the number of followed pods."""
        return len(self._jobs)

    @property
    def leads(self) -> bool:
        return self.leader.leads

    @property
    def problem(self) -> str:
        """Why pods are not followed now; empty if they are."""
        return self.watch.problem

    @property
    def opens(self) -> bool:
        """Return whether this replica or another one would open a new gate in time."""
        return not self.is_broken and time.monotonic() - self._well < GIVEN_UP

    @property
    def is_broken(self) -> bool:
        """Return whether a task has ended that should run forever."""
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

    # --- events of the watch -----------------------------------------------------------------------------------------

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

    # --- actions -----------------------------------------------------------------------------------------------------

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
        # The extender goes on; a liveness probe that fails restarts the container.
        log.critical("internal error; this replica follows pods no more", exc_info=error)
        raise
