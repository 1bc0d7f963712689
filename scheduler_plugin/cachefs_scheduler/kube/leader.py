"""Elects the replica that acts (opens gates, writes events, commands nodes): the holder of a Lease.

Clocks of other replicas are not used: a Lease has expired if this replica has seen no renewal for its duration.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from cachefs.errors import CachefsError
from cachefs_scheduler.kube.api import KubeObjectChanged, Lease, LeaseSpec

log = logging.getLogger(__name__)

# Seconds: duration of the Lease, time without a renewal after which its holder stops acting, and pause between
# renewals.
LEASE_SECONDS: Final = 15.0
LEAD_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 3.0


class ElectionApi(Protocol):
    """The subset of api.KubeApiClient that `LeaderElection` needs."""

    async def read_lease(self, name: str) -> Lease: ...
    async def create_lease(self, name: str, spec: LeaseSpec) -> Lease: ...
    async def replace_lease(self, lease: Lease) -> Lease: ...


class LeaderElection:
    """Holds or awaits the Lease. Used on the event loop."""

    def __init__(
        self, api: ElectionApi, name: str, identity: str, changed: Callable[[], None], can_lead: Callable[[], bool]
    ) -> None:
        """Create the elector of one replica.

        Args:
            identity: unique among replicas.
            changed: called when this replica begins or ceases to lead.
            can_lead: returns whether this replica could open gates; otherwise it gives up the Lease and takes none.
        """
        self._api = api
        self._name = name
        self._identity = identity
        self._changed = changed
        self._can_lead = can_lead
        self._renewed_at = -LEAD_SECONDS  # monotonic time of the last renewal
        self._last_lease: tuple[str | None, str | None] = (None, None)  # holder and renewTime last seen
        self._last_lease_at = 0.0
        self._other_held_at = -LEASE_SECONDS  # when another replica last held it
        self._holder = ""
        self._was_leader = False
        self._problem = ""

    @property
    def is_leader(self) -> bool:
        return time.monotonic() - self._renewed_at < LEAD_SECONDS

    @property
    def holder(self) -> str:
        """The last known holder of the Lease; "" if there was none."""
        return self._identity if self.is_leader else self._holder

    @property
    def is_held(self) -> bool:
        """Return whether any replica leads, as far as this one knows."""
        return self.is_leader or time.monotonic() - self._other_held_at < LEASE_SECONDS

    async def run(self) -> None:
        """Renew or seek the Lease until cancelled, then give it up."""
        try:
            while True:
                try:
                    async with asyncio.timeout(LEAD_SECONDS / 2):
                        await self._renew_or_take()
                    self._log_problem("")
                except (CachefsError, TimeoutError) as error:
                    self._log_problem(str(error) or "the API server does not answer in time")
                self._note_leadership()
                await asyncio.sleep(RENEW_SECONDS)
                self._note_leadership()
        finally:
            await self._release_lease()

    async def _renew_or_take(self) -> None:
        if not self._can_lead():
            await self._release_lease()
            raise CachefsError("this replica cannot follow pods, so it does not lead")
        try:
            lease = await self._api.read_lease(self._name)
        except KubeObjectChanged:
            await self._write_lease(None)
            return
        holder = lease.spec.holder or ""
        if holder not in ("", self._identity) and not self._is_expired(lease):
            self._renewed_at = -LEAD_SECONDS
            self._other_held_at = time.monotonic()
            self._holder = holder
            return
        await self._write_lease(lease)

    async def _write_lease(self, lease: Lease | None) -> None:
        begun = time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = lease.spec if lease is not None else LeaseSpec()
        is_ours = old.holder == self._identity
        spec = LeaseSpec(
            holder=self._identity, seconds=round(LEASE_SECONDS), renewed=now,
            acquired=old.acquired if is_ours else now,
            transitions=(old.transitions or 0) + (lease is not None and not is_ours),
        )  # fmt: skip
        try:
            if lease is None:
                await self._api.create_lease(self._name, spec)
            else:
                await self._api.replace_lease(msgspec.structs.replace(lease, spec=spec))
        except KubeObjectChanged:
            return  # another replica was quicker; the next turn sees that
        self._renewed_at = begun

    def _is_expired(self, lease: Lease) -> bool:
        """Return whether the holder has not renewed the Lease for its duration. A single observation proves nothing."""
        now, seen = time.monotonic(), (lease.spec.holder, lease.spec.renewed)
        if seen != self._last_lease:
            self._last_lease, self._last_lease_at = seen, now
        return now - self._last_lease_at >= (lease.spec.seconds or LEASE_SECONDS)

    async def _release_lease(self) -> None:
        if not self.is_leader:
            return
        self._renewed_at = -LEAD_SECONDS
        try:
            async with asyncio.timeout(1.0):
                lease = await self._api.read_lease(self._name)
                if lease.spec.holder == self._identity:
                    spec = msgspec.structs.replace(lease.spec, holder="", seconds=1)
                    await self._api.replace_lease(msgspec.structs.replace(lease, spec=spec))
        except (CachefsError, TimeoutError) as error:
            log.warning(
                "the Lease %s could not be released; another replica takes it when it expires: %s", self._name, error
            )

    def _note_leadership(self) -> None:
        if self.is_leader != self._was_leader:
            self._was_leader = self.is_leader
            what = "leads: it opens gates and sends commands" if self._was_leader else "no longer leads"
            log.info("this replica %s", what)
            self._changed()

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("the Lease %s cannot be kept: %s", self._name, problem)
