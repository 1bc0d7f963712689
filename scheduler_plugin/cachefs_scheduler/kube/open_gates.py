"""Opens the gates of pods while no replica of the service runs: `cachefs-scheduler open-gates`.

A CronJob runs it (scheduler_plugin/deploy/base/open-gates.yaml), so that pods with a gate do not wait forever without a
service. A replica is alive if the Lease changes; as in the election, clocks of other machines are not used.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.kube.api import (
    KubeApiClient,
    KubeApiRefused,
    KubeApiUnavailable,
    KubeObjectChanged,
    WatchExpired,
)
from cachefs_scheduler.kube.kube_messages import Pod
from cachefs_scheduler.kube.pod_job import GATE

log = logging.getLogger(__name__)

# Seconds between checks of the Lease, which a leader renews every 3 s.
CHECK_SECONDS: Final = 2.0
# Seconds for which the API server may be unreachable, at least.
_UNREACHABLE_SECONDS: Final = 30.0
# Concurrent calls to the API server; passes over all pods if calls fail; seconds between passes.
_MAX_CALLS: Final = 8
_ROUNDS: Final = 5
ROUND_SECONDS: Final = 2.0

# Holder and renewal time of the Lease; None: there is no Lease.
LeaseRenewal = tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class GateOpening:
    """The result of `open_gates`."""

    gates: int = 0
    # A replica has renewed the Lease meanwhile, and opens the remaining gates.
    is_alive: bool = False


class LeaseWatch:
    """Detects that no replica renews the Lease. Used on the event loop."""

    def __init__(self, api: KubeApiClient, lease: str) -> None:
        self._api = api
        self._lease = lease
        self._first_renewal: LeaseRenewal = None

    async def is_silent_for(self, seconds: float) -> bool:
        """Return True after *seconds* without a renewal, False as soon as the Lease is renewed. Time during which the
        API server is unreachable does not count, since replicas cannot renew then either.

        Raises CachefsError if the API server is unreachable for that long, or refuses.
        """
        responded_at = time.monotonic()
        since: float | None = None
        while True:
            try:
                if since is None:
                    self._first_renewal, since = await self._read_renewal(), time.monotonic()
                elif await self.is_renewed():
                    return False
                responded_at = time.monotonic()
            except KubeApiUnavailable:
                since = None
                if time.monotonic() - responded_at >= max(seconds, _UNREACHABLE_SECONDS):
                    raise
            if since is not None and time.monotonic() - since >= seconds:
                return True
            await asyncio.sleep(min(CHECK_SECONDS, seconds))

    async def is_renewed(self) -> bool:
        """Return whether the Lease has been renewed since it was first seen. Raises CachefsError."""
        now = await self._read_renewal()
        return now is not None and bool(now[0]) and now != self._first_renewal

    async def _read_renewal(self) -> LeaseRenewal:
        try:
            spec = (await self._api.read_lease(self._lease)).spec
        except KubeObjectChanged:
            return None
        return spec.holder or "", spec.renewed or ""


async def open_gates(api: KubeApiClient, lease_watch: LeaseWatch | None) -> GateOpening:
    """Open the gates of all pods; stop once *lease_watch* is broken. Raises CachefsError if some stay closed."""
    opened = 0
    for number in range(_ROUNDS):
        failed: list[CachefsError] = []
        try:
            async for pods, _ in api.list_pods(""):
                gated = [(pod, index) for pod in pods if (index := _gate_index(pod)) is not None]
                if gated and lease_watch is not None and await lease_watch.is_renewed():
                    return GateOpening(opened, is_alive=True)
                limit = asyncio.Semaphore(_MAX_CALLS)
                for problem in await asyncio.gather(*(_open_gate(api, pod, index, limit) for pod, index in gated)):
                    opened += problem is None
                    failed += [problem] if problem is not None else []
        except (KubeApiUnavailable, WatchExpired) as error:
            failed.append(error)
        if not failed:
            return GateOpening(opened)
        if number + 1 < _ROUNDS:
            await asyncio.sleep(ROUND_SECONDS)
    raise CachefsError(f"{opened} gates were opened, and some are still closed: {failed[0]}")


async def _open_gate(api: KubeApiClient, pod: Pod, index: int, limit: asyncio.Semaphore) -> CachefsError | None:
    """Open one gate. Returns None, or the error if it can be tried again. Raises KubeApiRefused."""
    name = f"{pod.metadata.namespace}/{pod.metadata.name}"
    async with limit:
        try:
            await api.open_gate(pod.metadata, index, GATE)
        except KubeApiRefused:
            raise
        except CachefsError as error:
            log.info("the gate of pod %s is not open yet: %s", name, error)
            return error
    log.info("the gate of pod %s is open", name)
    return None


def _gate_index(pod: Pod) -> int | None:
    """Return the index of the cachefs gate among the pod's gates."""
    return next((number for number, gate in enumerate(pod.spec.gates or ()) if gate.name == GATE), None)
