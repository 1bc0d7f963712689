"""Opens the gates of pods while no replica of the service is there that would: `cachefs-scheduler open-gates`.

A CronJob runs it (scheduler_plugin/deploy/base/open-gates.yaml), so that pods which wait for a copy do not wait for
ever where nobody gives slots. Whether a replica lives is seen from the Lease, by its changes: clocks of other machines
are not asked, as where replicas agree who leads.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.kube.api import ApiAway, ApiRefuses, Changed, Expired, KubernetesApi
from cachefs_scheduler.kube.pod_job import GATE
from cachefs_scheduler.kube.wire import Pod

log = logging.getLogger(__name__)

# Seconds between two looks at the Lease, which a replica that leads renews every 3 s.
LOOK_SECONDS: Final = 2.0
# Seconds for which an API server may be away, at least.
_PATIENCE: Final = 30.0
# Calls to the API server at the same time; times that all pods are listed, as some calls fail; seconds between these.
_AT_ONCE: Final = 8
_ROUNDS: Final = 5
ROUND_SECONDS: Final = 2.0

# Who holds the Lease, and when that was said last. None: there is no Lease.
Held = tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Opened:
    """What was done."""

    gates: int = 0
    # A replica has renewed the Lease meanwhile: the rest is its own.
    is_alive: bool = False


class Silence:
    """Does nobody renew the Lease? Used on the event loop."""

    def __init__(self, api: KubernetesApi, lease: str) -> None:
        self._api = api
        self._lease = lease
        self._seen: Held = None

    async def lasts(self, seconds: float) -> bool:
        """Wait for so long; False as soon as somebody renews it. What cannot be seen, as the API server is away, is no
        silence: a replica cannot renew it then either.

        Raises CachefsError where the API server does not answer for so long, or refuses.
        """
        answered = time.monotonic()
        since: float | None = None
        while True:
            try:
                if since is None:
                    self._seen, since = await self._look(), time.monotonic()
                elif await self.is_broken():
                    return False
                answered = time.monotonic()
            except ApiAway:
                since = None
                if time.monotonic() - answered >= max(seconds, _PATIENCE):
                    raise
            if since is not None and time.monotonic() - since >= seconds:
                return True
            await asyncio.sleep(min(LOOK_SECONDS, seconds))

    async def is_broken(self) -> bool:
        """Has somebody renewed it since it was seen first? Raises CachefsError."""
        now = await self._look()
        return now is not None and bool(now[0]) and now != self._seen

    async def _look(self) -> Held:
        try:
            spec = (await self._api.lease(self._lease)).spec
        except Changed:
            return None
        return spec.holder or "", spec.renewed or ""


async def open_gates(api: KubernetesApi, silence: Silence | None) -> Opened:
    """Open those of all pods; with *silence*, as long as it lasts. Raises CachefsError where some stay closed."""
    opened = 0
    for number in range(_ROUNDS):
        failed: list[CachefsError] = []
        try:
            async for pods, _ in api.list_pods(""):
                gated = [(pod, index) for pod in pods if (index := _index(pod)) is not None]
                if gated and silence is not None and await silence.is_broken():
                    return Opened(opened, is_alive=True)
                limit = asyncio.Semaphore(_AT_ONCE)
                for problem in await asyncio.gather(*(_open(api, pod, index, limit) for pod, index in gated)):
                    opened += problem is None
                    failed += [problem] if problem is not None else []
        except (ApiAway, Expired) as error:
            failed.append(error)
        if not failed:
            return Opened(opened)
        if number + 1 < _ROUNDS:
            await asyncio.sleep(ROUND_SECONDS)
    raise CachefsError(f"{opened} gates were opened, and some are still closed: {failed[0]}")


async def _open(api: KubernetesApi, pod: Pod, index: int, limit: asyncio.Semaphore) -> CachefsError | None:
    """None: it is open. Else why not, and it is to be tried again. Raises ApiRefuses."""
    name = f"{pod.metadata.namespace}/{pod.metadata.name}"
    async with limit:
        try:
            await api.open_gate(pod.metadata, index, GATE)
        except ApiRefuses:
            raise
        except CachefsError as error:
            log.info("the gate of pod %s is not open yet: %s", name, error)
            return error
    log.info("the gate of pod %s is open", name)
    return None


def _index(pod: Pod) -> int | None:
    """Of our gate among the pod's."""
    return next((number for number, gate in enumerate(pod.spec.gates or ()) if gate.name == GATE), None)
