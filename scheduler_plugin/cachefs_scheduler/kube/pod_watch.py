"""Follows pods that name a dataset: lists them, watches for changes, and lists again if the watch is lost."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Final, Protocol

from cachefs.backoff import Backoff
from cachefs.errors import CachefsError
from cachefs_scheduler.kube.api import WatchExpired
from cachefs_scheduler.kube.kube_messages import Pod
from cachefs_scheduler.kube.pod_job import DATASET, is_gated

log = logging.getLogger(__name__)

# Seconds before the next attempt; doubles after each attempt.
FIRST_PAUSE: Final = 0.5
MAX_PAUSE: Final = 30.0
# Part of a pause that is waited: spreads replicas, and many services after an outage.
_SPREAD: Final = (0.5, 1.0)
# Seconds after which a watch counts as successful.
_SUCCESS_SECONDS: Final = 30.0
# Most pods that are followed. A longer list is cut, and the log says so.
MAX_PODS: Final = 100_000


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
