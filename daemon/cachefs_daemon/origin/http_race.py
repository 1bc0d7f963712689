"""Hedging: a late request is sent a second time, on another connection, and the first good response counts.

The connection of the other request is aborted. An error does not count while the other request is in flight.
"""

import asyncio
import functools
import math
from typing import Final

from cachefs.planning.requests.hedging import only_few
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http_connection import Answer, Asked
from cachefs_daemon.origin.http_pool import HttpPool, drop

# Least seconds between two checks for late requests; and seconds to the next check after a hedge was not possible.
_LEAST: Final = 0.002
_AGAIN: Final = 0.05


class _Race(Asked):
    """A request in flight that may be hedged."""

    __slots__ = ("is_decided_by_rival", "late_after", "pool", "request", "rival", "room")

    def __init__(self, pool: HttpPool, request: bytes, room: int, late_after: float) -> None:
        super().__init__()
        self.pool = pool
        self.request = request
        self.room = room
        self.late_after = late_after  # seconds
        self.rival: asyncio.Task[Answer] | None = None  # the hedge
        self.is_decided_by_rival = False  # the first request has failed


class Races:
    """The requests to one endpoint. Used on one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._under_way: set[_Race] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, pool: HttpPool, request: bytes, room: int) -> Answer:
        """Send a request as HttpPool.ask does. *request* may reach the server twice."""
        race = _Race(pool, request, room, self._endpoint.sent(room).late_after)
        self._under_way.add(race)
        if self._timer is None and race.late_after < math.inf:
            self._timer = self._loop.call_later(race.late_after, self._look)
        try:
            answer = await pool.ask(request, room, race)
        except Exception:  # the hedge may still succeed; raised again if there is none
            other = await self._other(race)
            if other is None:
                raise
            return other
        else:
            if race.rival is None or _is_good(answer):
                return answer
            return await self._other(race) or answer
        finally:
            self._under_way.discard(race)
            if race.rival is not None:
                race.rival.cancel()

    async def _other(self, race: _Race) -> Answer | None:
        """Wait for the hedge, and return its response if it is a good one."""
        if race.rival is None:
            return None
        race.is_decided_by_rival = True
        await asyncio.wait((race.rival,))
        answer = _answer_of(race.rival)
        if answer is not None:
            self._endpoint.won()
        return answer

    def _look(self) -> None:
        """Hedge late requests."""
        self._timer = None
        now = self._loop.time()
        left = [(race.sent + race.late_after - now, race) for race in self._under_way if race.rival is None]
        late = [race for seconds, race in left if seconds <= 0]
        if late and only_few(len(late), len(self._under_way)):
            for race in late:
                if not race.pool.has_spare or not self._endpoint.may_hedge():
                    break
                self._send_again(race)
        if left:
            soonest = min((seconds for seconds, _ in left if seconds > 0), default=_AGAIN)
            self._timer = self._loop.call_later(min(_AGAIN, max(_LEAST, soonest)), self._look)

    def _send_again(self, race: _Race) -> None:
        race.rival = self._loop.create_task(race.pool.ask(race.request, race.room, spare=True))
        race.rival.add_done_callback(functools.partial(self._answered, race))

    def _answered(self, race: _Race, rival: "asyncio.Task[Answer]") -> None:
        """Handle the end of a hedge."""
        answer = _answer_of(rival)
        if answer is None:
            return
        if race.connection is not None and race.connection.outdo(race, answer):
            self._endpoint.won()
        elif not race.is_decided_by_rival:
            drop(answer)


def _answer_of(rival: "asyncio.Task[Answer]") -> Answer | None:
    """Return the response of a hedge if it is a good one."""
    if rival.cancelled() or rival.exception() is not None:
        return None
    answer = rival.result()
    return answer if _is_good(answer) else None


def _is_good(answer: Answer) -> bool:
    return answer.head.status in (200, 206) and answer.body is not None
