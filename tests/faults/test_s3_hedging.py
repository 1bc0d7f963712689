"""Requests that are sent twice: the first good answer counts, whatever becomes of the other one."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.http.connection import ClosedWithoutResponse, HttpResponse, IncompleteResponse
from cachefs_daemon.origin.http.hedging import HedgedRequests
from cachefs_daemon.origin.http.pool import HttpPool, ServerAddress
from cachefs_daemon.origin.http.tls import ClientTls
from tests.waiting import until_async

ROOM = 100
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 2\r\n\r\nno"
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncu"


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class Bench:
    """A server that answers each request when the test says so, and a client that knows what is late."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[bytes]] = []  # of each request, what it is answered; empty: nothing more
        self.open = 0  # connections
        self.endpoint = Endpoint("test", 8, hedge_share=0.1)
        for _ in range(200):
            self.endpoint.count_request(ROOM)
            self.endpoint.note_response("p", ROOM, time.monotonic() - 0.005)
        self.races = HedgedRequests(self.endpoint)
        self.pool: HttpPool

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                self.asked.append(answer)
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                if not answer.done():
                    return
                writer.write(answer.result())
                await writer.drain()
                if answer.result() in (CUT, b""):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def ask(self) -> "asyncio.Task[HttpResponse]":
        return asyncio.create_task(self.races.send_request(self.pool, b"GET / HTTP/1.1\r\n\r\n", ROOM))

    async def until_asked(self, count: int) -> None:
        await until_async(lambda: len(self.asked) >= count)

    async def until_open(self, count: int) -> None:
        await until_async(lambda: self.open == count)

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.asked), self.endpoint.hedged, self.endpoint.hedges_won


def play(scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        bench = Bench()
        server = await asyncio.start_server(bench.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        bench.pool = HttpPool(
            ServerAddress("127.0.0.1", port, tls=False), OriginSettings(max_connections=8), ClientTls(True)
        )
        try:
            await asyncio.wait_for(scene(bench), 30)
        finally:
            bench.pool.close()
            server.close()
            await bench.until_open(0)

    asyncio.run(run())


@pytest.mark.parametrize("winner", [0, 1])
def test_the_first_good_answer_counts_and_the_other_connection_is_aborted(winner: int) -> None:
    async def scene(bench: Bench) -> None:
        task = bench.ask()
        await bench.until_asked(2)
        bench.asked[winner].set_result(ok(b"mine"))
        assert (await task).body == b"mine"
        assert bench.counts == (2, 1, winner)
        await bench.until_open(1)
        # The connection that is left gives the next answer to the next request.
        again = bench.ask()
        await bench.until_asked(3)
        bench.asked[2].set_result(ok(b"next"))
        assert (await again).body == b"next"

    play(scene)


@pytest.mark.parametrize("bad", [BUSY, CUT, b""], ids=["busy", "cut", "closed"])
@pytest.mark.parametrize("first", [0, 1])
def test_an_error_is_no_answer_while_the_other_request_is_under_way(first: int, bad: bytes) -> None:
    async def scene(bench: Bench) -> None:
        task = bench.ask()
        await bench.until_asked(2)
        bench.asked[first].set_result(bad)
        await asyncio.wait([bench.asked[first]])
        await bench.until_open(2 if bad == BUSY else 1)
        assert not task.done()
        bench.asked[1 - first].set_result(ok(b"good"))
        assert (await task).body == b"good"

    play(scene)


def test_where_both_fail_the_first_one_says_why() -> None:
    async def scene(bench: Bench) -> None:
        task = bench.ask()
        await bench.until_asked(2)
        bench.asked[1].set_result(b"")
        bench.asked[0].set_result(CUT)
        with pytest.raises(IncompleteResponse):
            await task
        task = bench.ask()
        await bench.until_asked(4)
        bench.asked[3].set_result(CUT)
        bench.asked[2].set_result(BUSY)
        assert (await task).head.status == 503

    play(scene)


def test_whoever_stops_waiting_ends_both() -> None:
    async def scene(bench: Bench) -> None:
        task = bench.ask()
        await bench.until_asked(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await bench.until_open(0)

    play(scene)


def test_nothing_is_sent_twice_while_the_server_refuses_requests() -> None:
    async def scene(bench: Bench) -> None:
        bench.endpoint.note_refusal("p", "busy")
        tasks = [bench.ask() for _ in range(3)]
        await bench.until_asked(3)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert bench.counts == (3, 0, 0)
        for answer in bench.asked:
            answer.set_result(ok(b"good"))
        assert [(await task).body for task in tasks] == [b"good"] * 3

    play(scene)


def test_nothing_is_sent_twice_where_many_are_late() -> None:
    async def scene(bench: Bench) -> None:
        tasks = [bench.ask() for _ in range(8)]
        await bench.until_asked(8)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert bench.counts == (8, 0, 0)
        for answer in bench.asked:
            answer.set_result(b"")
        for task in tasks:
            with pytest.raises(ClosedWithoutResponse):
                await task

    play(scene)
