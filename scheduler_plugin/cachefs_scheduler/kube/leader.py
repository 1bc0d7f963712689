"""Chooses the replica that acts (opens gates, writes events, gives nodes orders): the one that holds a Lease.

The others' clocks are not asked: a Lease counts as given up when nobody has renewed it for its time, as seen from here.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from cachefs.errors import CachefsError
from cachefs_scheduler.kube.api import Changed, Lease, LeaseSpec

log = logging.getLogger(__name__)

# Seconds: for which a Lease holds, after which its holder acts no more if it could not renew it, and between renewals.
LEASE_SECONDS: Final = 15.0
ACT_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 3.0


class Leases(Protocol):
    """See api.KubernetesApi."""

    async def lease(self, name: str) -> Lease: ...
    async def create_lease(self, name: str, spec: LeaseSpec) -> Lease: ...
    async def replace_lease(self, lease: Lease) -> Lease: ...


class Leader:
    """Used on the event loop."""

    def __init__(
        self, api: Leases, name: str, identity: str, changed: Callable[[], None], is_able: Callable[[], bool]
    ) -> None:
        """identity: no other replica has it. changed: called when this replica begins to lead, or ends. is_able: could
        it open gates? While it cannot, it gives the Lease up, and takes it from nobody."""
        self._api = api
        self._name = name
        self._identity = identity
        self._changed = changed
        self._is_able = is_able
        self._renewed = -ACT_SECONDS  # by our clock, when the Lease was ours last
        self._seen: tuple[str | None, str | None] = (None, None)  # holder and renewTime, and since when
        self._since = 0.0
        self._other = -LEASE_SECONDS  # when another replica was seen to hold it
        self._holder = ""
        self._led = False
        self._problem = ""

    @property
    def leads(self) -> bool:
        return time.monotonic() - self._renewed < ACT_SECONDS

    @property
    def holder(self) -> str:
        """The replica that holds the Lease, as it was seen last; "" where none was."""
        return self._identity if self.leads else self._holder

    @property
    def is_held(self) -> bool:
        """Does any replica lead, as far as is known here?"""
        return self.leads or time.monotonic() - self._other < LEASE_SECONDS

    async def run(self) -> None:
        """Until it is cancelled; then the Lease is given up."""
        try:
            while True:
                try:
                    async with asyncio.timeout(ACT_SECONDS / 2):
                        await self._turn()
                    self._say("")
                except (CachefsError, TimeoutError) as error:
                    self._say(str(error) or "the API server does not answer in time")
                self._tell()
                await asyncio.sleep(RENEW_SECONDS)
                self._tell()
        finally:
            await self._give_up()

    async def _turn(self) -> None:
        if not self._is_able():
            await self._give_up()
            raise CachefsError("this replica cannot follow pods, so it does not lead")
        try:
            lease = await self._api.lease(self._name)
        except Changed:
            await self._write(None)
            return
        holder = lease.spec.holder or ""
        if holder not in ("", self._identity) and not self._is_given_up(lease):
            self._renewed = -ACT_SECONDS
            self._other = time.monotonic()
            self._holder = holder
            return
        await self._write(lease)

    async def _write(self, lease: Lease | None) -> None:
        """Make the Lease ours, or renew it."""
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
        except Changed:
            return  # another replica was quicker; the next turn sees it
        self._renewed = begun

    def _is_given_up(self, lease: Lease) -> bool:
        """Has nobody renewed it for its time? That it was seen once says nothing."""
        now, seen = time.monotonic(), (lease.spec.holder, lease.spec.renewed)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= (lease.spec.seconds or LEASE_SECONDS)

    async def _give_up(self) -> None:
        if not self.leads:
            return
        self._renewed = -ACT_SECONDS
        try:
            async with asyncio.timeout(1.0):
                lease = await self._api.lease(self._name)
                if lease.spec.holder == self._identity:
                    spec = msgspec.structs.replace(lease.spec, holder="", seconds=1)
                    await self._api.replace_lease(msgspec.structs.replace(lease, spec=spec))
        except (CachefsError, TimeoutError) as error:
            log.warning("the Lease %s could not be given up, another replica takes it in time: %s", self._name, error)

    def _tell(self) -> None:
        if self.leads != self._led:
            self._led = self.leads
            what = "leads: it opens gates and gives orders" if self._led else "does not lead any more"
            log.info("this replica %s", what)
            self._changed()

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("the Lease %s cannot be kept: %s", self._name, problem)
