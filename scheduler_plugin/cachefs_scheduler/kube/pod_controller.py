"""Follows the pods of a cluster and acts for their jobs: opens gates, writes events, informs Advice.

`PodWatch` follows pods that name a dataset: it lists them, watches for changes, and lists again if the watch is lost.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, Protocol

from cachefs.backoff import Backoff
from cachefs.errors import CachefsError
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.kube.api import KubeApiClient, KubeObjectChanged, WatchExpired
from cachefs_scheduler.kube.gangs import PodGangs
from cachefs_scheduler.kube.kube_messages import EventLimiter, Pod, PodEvent
from cachefs_scheduler.kube.leader import LeaderElection
from cachefs_scheduler.kube.pod_job import DATASET, GATE, is_gated
from cachefs_scheduler.kube.pod_jobs import OpenGate, PodJobs

# Seconds before the next attempt; doubles after each attempt.
FIRST_PAUSE: Final = 0.5
MAX_PAUSE: Final = 30.0
# Part of a pause that is waited: spreads replicas, and many services after an outage.
_SPREAD: Final = (0.5, 1.0)
# Seconds after which a watch counts as successful.
_SUCCESS_SECONDS: Final = 30.0
# Most pods that are followed. A longer list is cut, and the log says so.
MAX_PODS: Final = 100_000
log = logging.getLogger(__name__)

# Longest and shortest pause between two passes over pending work, in seconds. The shortest pause groups changes: a job
# with a thousand pods causes a few passes, not a thousand.
PASS_SECONDS: Final = 5.0
MIN_PASS_SECONDS: Final = 0.05
# Seconds without an API server or a leading replica after which pods get no more gates.
GIVEN_UP_SECONDS: Final = 60.0
# Concurrent calls to the API server.
_MAX_CALLS: Final = 8


class PodApi(Protocol):
    """The subset of api.KubeApiClient that `PodWatch` needs."""

    def list_pods(self, selector: str) -> AsyncIterator[tuple[list[Pod], str]]: ...
    def watch_pods(self, selector: str, version: str) -> AsyncIterator[tuple[str, Pod]]: ...


class PodListener(Protocol):
    """Receives changes of pods."""

    def replace_pods(self, pods: list[Pod]) -> None:
        """Replace all known pods by these."""

    def update_pod(self, pod: Pod) -> None:
        """Record a new or changed pod."""

    def remove_pod(self, uid: str) -> None:
        """Remove a pod that is deleted, has ended, or names no dataset any more. The listener may not know it."""


class PodWatch:
    """Watches pods for a listener. Used on the event loop."""

    def __init__(self, api: PodApi, selector: str, listener: PodListener) -> None:
        self._api = api
        self._selector = selector
        self._listener = listener
        self._known: set[str] = set()
        # Version from which the watch resumes; "": all pods must be listed.
        self._version = ""
        # Why pods are not followed now; empty if they are.
        self.problem = "the pods have not been listed yet"

    async def run(self) -> None:
        """Follow pods until cancelled."""
        backoff = Backoff(FIRST_PAUSE, MAX_PAUSE, _SPREAD)
        while True:
            begun = time.monotonic()
            try:
                if not self._version:
                    await self._list_pods()
                    self._set_problem("")
                await self._watch_changes()
            except WatchExpired:
                self._version = ""
            except CachefsError as error:
                self._set_problem(str(error))
            if time.monotonic() - begun >= _SUCCESS_SECONDS:
                backoff.reset()
            await asyncio.sleep(backoff.note_failure(begun))

    async def _list_pods(self) -> None:
        found: list[Pod] = []
        last = ""
        async for pods, version in self._api.list_pods(self._selector):
            last = version
            found += [pod for pod in pods if _is_relevant(pod)]
            if len(found) > MAX_PODS:
                log.error("more than %d pods name a dataset; those beyond are not followed", MAX_PODS)
                del found[MAX_PODS:]
        self._known = {pod.metadata.uid for pod in found}
        self._listener.replace_pods(found)
        self._version = last

    async def _watch_changes(self) -> None:
        async for kind, pod in self._api.watch_pods(self._selector, self._version):
            self._set_problem("")
            self._version = pod.metadata.resource_version or self._version
            if kind in ("ADDED", "MODIFIED", "DELETED"):
                self._record_change(pod, is_gone=kind == "DELETED")

    def _record_change(self, pod: Pod, *, is_gone: bool) -> None:
        uid = pod.metadata.uid
        if is_gone or not _is_relevant(pod):
            if uid in self._known:
                self._known.discard(uid)
                self._listener.remove_pod(uid)
        elif uid in self._known or len(self._known) < MAX_PODS:
            self._known.add(uid)
            self._listener.update_pod(pod)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            if problem:
                log.warning("pods cannot be followed for now: %s", problem)
            else:
                log.info("following %d pods that name a dataset", len(self._known))


def _is_relevant(pod: Pod) -> bool:
    return DATASET in (pod.metadata.annotations or {}) or is_gated(pod)


class PodController:
    """The Kubernetes controller of one replica. Used on the event loop."""

    def __init__(
        self, api: KubeApiClient, advisor: AdvisorInterface, gangs: PodGangs, names: tuple[str, str, str]
    ) -> None:
        """names: the Lease's name, this replica's identity, and the label selector of pods."""
        lease, self._identity, selector = names
        self._api = api
        self._advisor = advisor
        self._jobs = PodJobs(advisor, gangs)
        self._event_limiter = EventLimiter()
        self._wake = asyncio.Event()
        self.watch = PodWatch(api, selector, self)
        self.leader = LeaderElection(api, lease, self._identity, self._leader_changed, self._can_lead)
        self._tasks: list[asyncio.Task[None]] = []
        self._limit = asyncio.Semaphore(_MAX_CALLS)
        # Monotonic times when a replica last led and pods were followed, and when pods were last followed.
        self._served_at = self._followed_at = time.monotonic()
        self.gates_opened = 0
        self.events_written = 0

    def __len__(self) -> int:
        """Return the number of followed pods."""
        return len(self._jobs)

    @property
    def is_leader(self) -> bool:
        return self.leader.is_leader

    @property
    def problem(self) -> str:
        """Why pods are not followed now; empty if they are."""
        return self.watch.problem

    @property
    def can_open_gates(self) -> bool:
        """Return whether this replica or another one would open a new gate in time."""
        return not self.is_broken and time.monotonic() - self._served_at < GIVEN_UP_SECONDS

    @property
    def is_broken(self) -> bool:
        """Return whether a task has ended that should run forever."""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        self._unsubscribe = self._advisor.subscribe(self._admissions_changed)
        for work in (self.watch.run(), self.leader.run(), self._act_forever()):
            self._tasks.append(asyncio.create_task(_log_crash(work)))

    async def stop(self) -> None:
        if self._tasks:
            self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()

    # --- events of the watch -----------------------------------------------------------------------------------------

    def replace_pods(self, pods: list[Pod]) -> None:
        self._jobs.replace_pods(pods, time.monotonic())
        self._wake.set()

    def update_pod(self, pod: Pod) -> None:
        self._jobs.update_pod(pod, time.monotonic())
        self._wake.set()

    def remove_pod(self, uid: str) -> None:
        self._jobs.remove_pod(uid, time.monotonic())
        self._wake.set()

    def _admissions_changed(self) -> None:
        self._jobs.admissions_changed()
        self._wake.set()

    def _leader_changed(self) -> None:
        if self.leader.is_leader:
            self._jobs.begin_leading(time.monotonic())
            self._wake.set()

    def _can_lead(self) -> bool:
        return not self.is_broken and time.monotonic() - self._followed_at < GIVEN_UP_SECONDS

    # --- actions -----------------------------------------------------------------------------------------------------

    async def _act_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PASS_SECONDS):
                    await self._wake.wait()
            await asyncio.sleep(MIN_PASS_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            if not self.problem:
                self._followed_at = now
                self._served_at = now if self.leader.is_held else self._served_at
            if not self.leader.is_leader:
                self._jobs.drop_ended(now)
                continue
            if self.watch.problem:
                continue
            try:
                due = self._jobs.collect_actions(now)
            except Exception as error:
                log.error("internal error; closed gates stay closed until it is fixed", exc_info=error)
                continue
            if due.has_more:
                self._wake.set()
            notes = [note for note in due.events if self._event_limiter.can_write(note, now)]
            await asyncio.gather(*map(self._open_gate, due.gates), *map(self._write_event, notes))

    async def _open_gate(self, gate: OpenGate) -> None:
        async with self._limit:
            if not self.leader.is_leader:
                return
            try:
                await self._api.open_gate(gate.pod, gate.index, GATE)
                self.gates_opened += 1
            except KubeObjectChanged:
                log.info(
                    "pod %s/%s has changed meanwhile; its gate is checked again", gate.pod.namespace, gate.pod.name
                )
            except CachefsError as error:
                log.warning("the gate of pod %s/%s is not open yet: %s", gate.pod.namespace, gate.pod.name, error)
                self._jobs.note_failed_gate(gate.pod.uid, time.monotonic())

    async def _write_event(self, note: PodEvent) -> None:
        async with self._limit:
            try:
                await self._api.write_event(note, uuid.uuid4().hex[:16], self._identity)
                self.events_written += 1
            except CachefsError as error:
                log.info("no event for pod %s/%s: %s", note.pod.namespace, note.pod.name, error)


async def _log_crash(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:
        # The extender goes on; a liveness probe that fails restarts the container.
        log.critical("internal error; this replica no longer follows pods", exc_info=error)
        raise
