"""Hedging: a late request is sent a second time, on another connection, and the first good response counts.

The connection of the other request is aborted. An error does not count while the other request is in flight.
"""

import asyncio
import functools
import math
from typing import Final

from cachefs.planning.requests.request_times import are_few_late
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http.connection import HttpResponse, InFlightRequest
from cachefs_daemon.origin.http.pool import HttpPool, count_unused_body

# Least seconds between two checks for late requests; and seconds to the next check after a hedge was not possible.
_MIN_CHECK_SECONDS: Final = 0.002
_MAX_CHECK_SECONDS: Final = 0.05


class _HedgedRequest(InFlightRequest):
    """A request in flight that may be hedged."""

    __slots__ = ("body_size", "hedge", "is_decided_by_hedge", "late_after", "pool", "request")

    def __init__(self, pool: HttpPool, request: bytes, room: int, late_after: float) -> None:
        super().__init__()
        self.pool = pool
        self.request = request
        self.body_size = room
        self.late_after = late_after  # seconds
        self.hedge: asyncio.Task[HttpResponse] | None = None  # the hedge
        self.is_decided_by_hedge = False  # the first request has failed


class HedgedRequests:
    """The requests to one endpoint. Used on one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._in_flight: set[_HedgedRequest] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def send_request(self, pool: HttpPool, request: bytes, body_size: int) -> HttpResponse:
        """Send a request as HttpPool.send_request does. *request* may reach the server twice."""
        race = _HedgedRequest(pool, request, body_size, self._endpoint.count_request(body_size).late_after)
        self._in_flight.add(race)
        if self._timer is None and race.late_after < math.inf:
            self._timer = self._loop.call_later(race.late_after, self._hedge_late_requests)
        try:
            response = await pool.send_request(request, body_size, race)
        except Exception:  # the hedge may still succeed; raised again if there is none
            other = await self._wait_for_hedge(race)
            if other is None:
                raise
            return other
        else:
            if race.hedge is None or _is_good(response):
                return response
            return await self._wait_for_hedge(race) or response
        finally:
            self._in_flight.discard(race)
            if race.hedge is not None:
                race.hedge.cancel()

    async def _wait_for_hedge(self, race: _HedgedRequest) -> HttpResponse | None:
        """Wait for the hedge, and return its response if it is a good one."""
        if race.hedge is None:
            return None
        race.is_decided_by_hedge = True
        await asyncio.wait((race.hedge,))
        response = _good_response_of(race.hedge)
        if response is not None:
            self._endpoint.count_hedge_won()
        return response

    def _hedge_late_requests(self) -> None:
        """Hedge late requests."""
        self._timer = None
        now = self._loop.time()
        left = [(race.sent_at + race.late_after - now, race) for race in self._in_flight if race.hedge is None]
        late = [race for seconds, race in left if seconds <= 0]
        if late and are_few_late(len(late), len(self._in_flight)):
            for race in late:
                if not race.pool.has_spare or not self._endpoint.may_hedge():
                    break
                self._send_hedge(race)
        if left:
            soonest = min((seconds for seconds, _ in left if seconds > 0), default=_MAX_CHECK_SECONDS)
            self._timer = self._loop.call_later(
                min(_MAX_CHECK_SECONDS, max(_MIN_CHECK_SECONDS, soonest)), self._hedge_late_requests
            )

    def _send_hedge(self, race: _HedgedRequest) -> None:
        race.hedge = self._loop.create_task(race.pool.send_request(race.request, race.body_size, spare=True))
        race.hedge.add_done_callback(functools.partial(self._finish_hedge, race))

    def _finish_hedge(self, race: _HedgedRequest, rival: "asyncio.Task[HttpResponse]") -> None:
        """Handle the end of a hedge."""
        response = _good_response_of(rival)
        if response is None:
            return
        if race.connection is not None and race.connection.complete_early(race, response):
            self._endpoint.count_hedge_won()
        elif not race.is_decided_by_hedge:
            count_unused_body(response)


def _good_response_of(rival: "asyncio.Task[HttpResponse]") -> HttpResponse | None:
    """Return the response of a hedge if it is a good one."""
    if rival.cancelled() or rival.exception() is not None:
        return None
    response = rival.result()
    return response if _is_good(response) else None


def _is_good(response: HttpResponse) -> bool:
    return response.head.status in (200, 206) and response.body is not None
