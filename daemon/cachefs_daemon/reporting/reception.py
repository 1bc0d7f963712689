"""Answers observers and schedulers on the control endpoint."""

import asyncio
import time
from collections import Counter
from typing import Final

import msgspec
from aiohttp import web

from cachefs.errors import AccessDenied, Busy, ConfigError
from cachefs.observe_messages import (
    LEAST_PAUSE,
    MEMBERS_PATH,
    MOST_WAIT,
    ORDER_PATH,
    REPORT_PATH,
    Member,
    Members,
    Order,
)
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.reporting.orders import Orders
from cachefs_daemon.reporting.reports import Reports
from cachefs_daemon.sharing.endpoint import ControlEndpoint

# Most waiting requests: of one observer, and of all together.
MOST_OF_ONE: Final = 4
MOST_WAITING: Final = 32
_PACKED: Final = "application/msgpack"


class Reception:
    """Handles their requests. Used on the event loop. The endpoint has verified that the clients are observers."""

    def __init__(self, endpoint: ControlEndpoint, membership: Membership, reports: Reports, orders: Orders) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._reports = reports
        self._orders = orders
        self._waiting: Counter[str] = Counter()  # by observer
        self._answered: dict[str, float] = {}  # by observer: monotonic seconds of its last report
        endpoint.add("GET", MEMBERS_PATH, self._members)
        endpoint.add("GET", REPORT_PATH, self._report)
        endpoint.add("POST", ORDER_PATH, self._order)

    async def _members(self, request: web.Request) -> web.Response:
        view = self._membership.view
        members = [
            Member(
                id=one.id, name=one.name, host=one.host, control_port=one.control_port, zone=one.zone, state=one.state
            )
            for one in view.members
        ]
        return _packed(Members(cluster=self._endpoint.cluster, me=view.me, members=members))

    async def _report(self, request: web.Request) -> web.Response:
        """Answer with a report. Query: `after`, `instance`: of the last report; `wait`: seconds; `pause`: least seconds
        since the last response."""
        who = self._endpoint.observer(request)
        after, wait = _number(request, "after", 0.0, 2.0**53), _number(request, "wait", 25.0, MOST_WAIT)
        pause = max(LEAST_PAUSE, _number(request, "pause", LEAST_PAUSE, MOST_WAIT))
        if self._waiting[who] >= MOST_OF_ONE or self._waiting.total() >= MOST_WAITING:
            raise Busy(f"{self._waiting[who]} requests of {who} wait already, {self._waiting.total()} of all observers")
        self._waiting[who] += 1
        try:
            # An observer with a long pause gets all changes of that time at once.
            await asyncio.sleep(self._answered.get(who, -MOST_WAIT) + pause - time.monotonic())
            known = int(after) if request.query.get("instance") == self._reports.instance else 0
            report = await self._reports.after(known, wait)
            self._answered[who] = time.monotonic()
            return _packed(report)
        finally:
            self._waiting[who] -= 1
            self._waiting += Counter()  # removes zero counts

    async def _order(self, request: web.Request) -> web.Response:
        who = self._endpoint.observer(request)
        if not self._endpoint.may_order(who):
            raise AccessDenied(f"{who} may look and not order; add it to cluster.schedulers of this node")
        try:
            order = msgspec.msgpack.decode(await request.read(), type=Order)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"no order: {error}") from None
        return _packed(await self._orders.carry_out(order, who))


def _packed(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type=_PACKED)


def _number(request: web.Request, name: str, usual: float, most: float) -> float:
    text = request.query.get(name, "")
    try:
        value = float(text) if text else usual
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} = {text[:32]!r}: expected a number, 0 or more")
    return min(value, most)
