"""Answers observers and schedulers on the control endpoint."""

import asyncio
import time
from collections import Counter
from typing import Final

import msgspec
from aiohttp import web

from cachefs.errors import AccessDenied, Busy, ConfigError
from cachefs.observe_messages import (
    COMMAND_PATH,
    MAX_WAIT_SECONDS,
    MEMBERS_PATH,
    MIN_PAUSE_SECONDS,
    REPORT_PATH,
    ClusterMember,
    ClusterMembers,
    NodeCommand,
)
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.reporting.command_executor import CommandExecutor
from cachefs_cluster.reporting.reports import NodeReports
from cachefs_cluster.sharing.endpoint import ControlEndpoint

# Most waiting requests: of one observer, and of all together.
MAX_REQUESTS_OF_OBSERVER: Final = 4
MAX_REQUESTS: Final = 32
_CONTENT_TYPE: Final = "application/msgpack"


class ObserverEndpoint:
    """Handles their requests. Used on the event loop. The endpoint has verified that the clients are observers."""

    def __init__(
        self, endpoint: ControlEndpoint, membership: Membership, reports: NodeReports, orders: CommandExecutor
    ) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._reports = reports
        self._command_executor = orders
        self._waiting: Counter[str] = Counter()  # by observer
        self._last_reports: dict[str, float] = {}  # by observer: monotonic seconds of its last report
        endpoint.add_route("GET", MEMBERS_PATH, self._serve_members)
        endpoint.add_route("GET", REPORT_PATH, self._serve_report)
        endpoint.add_route("POST", COMMAND_PATH, self._execute_command)

    async def _serve_members(self, request: web.Request) -> web.Response:
        view = self._membership.view
        members = [
            ClusterMember(
                id=one.id, name=one.name, host=one.host, control_port=one.control_port, zone=one.zone, state=one.state
            )
            for one in view.members
        ]
        return _encoded_response(ClusterMembers(cluster=self._endpoint.cluster, me=view.me, members=members))

    async def _serve_report(self, request: web.Request) -> web.Response:
        """Answer with a report. Query: `after`, `instance`: of the last report; `wait`: seconds; `pause`: least seconds
        since the last response."""
        who = self._endpoint.observer_name(request)
        after, wait = (
            _query_number(request, "after", 0.0, 2.0**53),
            _query_number(request, "wait", 25.0, MAX_WAIT_SECONDS),
        )
        pause = max(MIN_PAUSE_SECONDS, _query_number(request, "pause", MIN_PAUSE_SECONDS, MAX_WAIT_SECONDS))
        if self._waiting[who] >= MAX_REQUESTS_OF_OBSERVER or self._waiting.total() >= MAX_REQUESTS:
            raise Busy(f"{self._waiting[who]} requests of {who} wait already, {self._waiting.total()} of all observers")
        self._waiting[who] += 1
        try:
            # An observer with a long pause gets all changes of that time at once.
            await asyncio.sleep(self._last_reports.get(who, -MAX_WAIT_SECONDS) + pause - time.monotonic())
            known = int(after) if request.query.get("instance") == self._reports.instance else 0
            report = await self._reports.changes_since(known, wait)
            self._last_reports[who] = time.monotonic()
            return _encoded_response(report)
        finally:
            self._waiting[who] -= 1
            self._waiting += Counter()  # removes zero counts

    async def _execute_command(self, request: web.Request) -> web.Response:
        who = self._endpoint.observer_name(request)
        if not self._endpoint.may_command(who):
            raise AccessDenied(
                f"{who} may read reports but not send commands; add it to cluster.schedulers of this node"
            )
        try:
            order = msgspec.msgpack.decode(await request.read(), type=NodeCommand)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"invalid command: {error}") from None
        return _encoded_response(await self._command_executor.execute(order, who))


def _encoded_response(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type=_CONTENT_TYPE)


def _query_number(request: web.Request, name: str, usual: float, most: float) -> float:
    text = request.query.get(name, "")
    try:
        value = float(text) if text else usual
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} = {text[:32]!r}: expected a number, 0 or more")
    return min(value, most)
