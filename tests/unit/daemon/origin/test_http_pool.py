"""Our HTTP client against a server that answers with whatever bytes a test wants, over real connections."""

import asyncio
import itertools
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError, SSLError
from hypothesis import given
from hypothesis import strategies as st

from cachefs_bench.lab.ports import free_port
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.http import connection as http_connection
from cachefs_daemon.origin.http.connection import ClosedWithoutResponse, HttpResponse, IncompleteResponse, ReadTimeout
from cachefs_daemon.origin.http.head import MAX_HEAD_BYTES, MalformedHead
from cachefs_daemon.origin.http.pool import HttpPool, ServerAddress
from cachefs_daemon.origin.http.tls import ClientTls
from tests import virtual_time
from tests.servers import faulty
from tests.servers.scripted import HALF_CLOSE, RESET, Script, ScriptedServer, scripted
from tests.waiting import until_async

CERTIFICATE = Path(faulty.__file__).parent / "localhost.pem"
BODY = bytes(range(200))
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 200\r\nETag: "e"\r\n\r\n' + BODY
Scene = Callable[[ScriptedServer, HttpPool], Awaitable[None]]


def play(script: Script, scene: Scene, *, verify: str | None = None, limits: OriginSettings | None = None) -> None:
    """verify: where the certificates are with which TLS is checked; None: no TLS."""

    async def run() -> None:
        tls = None
        if verify is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(CERTIFICATE)
        async with scripted(script, tls) as server:
            where = ServerAddress("localhost" if tls else "127.0.0.1", server.port, tls is not None)
            pool = HttpPool(where, limits or OriginSettings(), ClientTls(verify or True))
            try:
                await scene(server, pool)
            finally:
                pool.close()

    virtual_time.run(run())


def always(*pieces: bytes) -> Script:
    return lambda request: pieces


async def ask(pool: HttpPool, room: int = 200) -> HttpResponse:
    return await asyncio.wait_for(pool.send_request(b"GET / HTTP/1.1\r\n\r\n", room), 20)


def test_a_connection_is_used_again_and_answers_stay_as_they_are() -> None:
    bodies = iter([BODY, BODY[::-1], BODY])

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        first, second = (await ask(pool)).body, (await ask(pool)).body
        assert (first, second) == (BODY, BODY[::-1])
        del first
        assert (await ask(pool)).body == BODY
        assert second == BODY[::-1]
        assert (server.connections, len(server.requests)) == (1, 3)

    play(lambda request: [ANSWER[:-200], next(bodies)], scene)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        held = [(await ask(pool)).body for _ in range(3)]
        places = {memoryview_address(one) for one in held}
        assert len(places) == 3
        held.clear()
        assert memoryview_address((await ask(pool)).body) in places

    play(always(ANSWER), scene)


def memoryview_address(view: memoryview | None) -> int:
    assert view is not None
    return int(view.obj.__array_interface__["data"][0])  # type: ignore[attr-defined]


def test_cut_at_any_byte_an_answer_is_an_error() -> None:
    cuts = iter(range(len(ANSWER)))

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        for cut in range(len(ANSWER)):
            with pytest.raises(IncompleteResponse if cut else ClosedWithoutResponse):
                await ask(pool)
        assert server.connections == len(ANSWER)

    play(lambda request: [ANSWER[: next(cuts)], b""], scene)


@given(st.lists(st.integers(1, len(ANSWER) + 40), max_size=12))
def test_an_answer_may_come_in_any_pieces(cuts: list[int]) -> None:
    text = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + ANSWER
    borders = sorted({0, *cuts, len(text)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(borders)]

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        for _ in range(2):
            found = await ask(pool)
            assert (found.head.status, found.body) == (200, BODY)

    play(always(*pieces), scene)


@given(st.binary(max_size=120), st.booleans())
def test_of_anything_else_comes_an_error_or_what_was_promised(noise: bytes, begins_well: bool) -> None:
    text = (ANSWER[:20] if begins_well else b"") + noise

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        try:
            found = await ask(pool)
        except (MalformedHead, IncompleteResponse, ClosedWithoutResponse):
            return
        assert found.body is None or len(found.body) == found.head.length

    play(always(text, b""), scene)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ANSWER + b"x", IncompleteResponse),
        (ANSWER + ANSWER, IncompleteResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", MalformedHead),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX: a\r\n b\r\n\r\na", MalformedHead),
        (b"HTTP/1.1 200 OK\nContent-Length: 1\n\na\r\n\r\n", MalformedHead),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES, MalformedHead),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 400, MalformedHead),
        (b"SSH-2.0-OpenSSH\r\n\r\n", MalformedHead),
    ],
    ids=["surplus", "two answers", "two lengths", "folded", "bare LF", "large", "interim for ever", "not HTTP"],
)
def test_after_a_surprise_the_connection_is_not_used_again(answer: bytes, error: type[Exception]) -> None:
    answers = iter([[answer], [ANSWER]])

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        with pytest.raises(error):
            await ask(pool)
        assert (await ask(pool)).body == BODY
        assert server.connections == 2

    play(lambda request: next(answers), scene)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 204 Nothing\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 200\r\n\r\n",
    ],
)
def test_a_body_that_was_not_asked_for_is_not_received(answer: bytes) -> None:
    answers = iter([[answer], [ANSWER]])

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        assert (await ask(pool)).body is None
        assert (await ask(pool)).body == BODY
        assert server.connections == 2

    play(lambda request: next(answers), scene)


@pytest.mark.parametrize("verify", [None, str(CERTIFICATE)], ids=["plain", "TLS"])
def test_reset_at_any_byte_an_answer_is_an_error_and_with_its_last_byte_it_is_whole(verify: str | None) -> None:
    step = 1 if verify is None else 9  # a handshake of TLS takes 5 ms
    sent = [*range(0, len(ANSWER) - 1, step), len(ANSWER) - 1, len(ANSWER)]
    cuts = iter(sent)

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        for _ in sent[:-1]:
            with pytest.raises((IncompleteResponse, ClosedWithoutResponse)):
                await ask(pool)
        assert (await ask(pool)).body == BODY
        assert server.connections == len(sent)

    play(lambda request: [*filter(None, [ANSWER[: next(cuts)]]), RESET], scene, verify=verify)


def test_a_server_that_sends_no_more_is_not_asked_again_on_that_connection() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        for _ in range(3):
            assert (await ask(pool)).body == BODY
        assert server.connections == 3

    play(always(ANSWER, HALF_CLOSE), scene)


def test_an_answer_that_comes_byte_by_byte_is_waited_for_and_given_up_without_a_trace() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        assert (await ask(pool)).body == BODY
        server.pause = 10.0
        asking = asyncio.create_task(ask(pool))
        await until_async(lambda: len(server.requests) == 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 0.05)
        assert not pool._idle_connections
        server.drop_all()
        server.pause = 0.0
        assert (await ask(pool)).body == BODY

    play(always(*(bytes([byte]) for byte in ANSWER)), scene)


def test_one_who_has_waited_for_a_connection_that_is_just_closed_gets_another() -> None:
    answers = iter([[ANSWER], [b""], [ANSWER]])

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        both = await asyncio.gather(ask(pool), ask(pool))
        assert [found.body for found in both] == [BODY, BODY]
        assert (server.connections, len(server.requests)) == (2, 3)

    play(lambda request: next(answers), scene, limits=OriginSettings(max_connections=1))


def test_a_connection_that_was_used_is_named() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        assert (await ask(pool)).reused_connection is None
        again = await ask(pool)
        assert again.reused_connection is not None
        again.reused_connection.abort()
        assert (await ask(pool)).reused_connection is None
        assert server.connections == 2

    play(always(ANSWER), scene)


def test_a_connection_that_the_server_closed_meanwhile_is_replaced_once() -> None:
    answers = iter([[ANSWER], [b""], [ANSWER], [b""], [b""]])

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        await ask(pool)
        assert (await ask(pool)).body == BODY
        assert (server.connections, len(server.requests)) == (2, 3)
        with pytest.raises(ClosedWithoutResponse):
            await ask(pool)
        assert (server.connections, len(server.requests)) == (3, 5)

    play(lambda request: next(answers), scene)


def test_a_server_that_says_close_is_taken_at_its_word() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        await ask(pool)
        await ask(pool)
        assert server.connections == 2

    play(always(ANSWER.replace(b"ETag", b"Connection: close\r\nETag")), scene)


def test_bytes_between_two_answers_end_the_connection() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        server.script = always(ANSWER)
        await ask(pool)
        (writer,) = server._writers
        writer.write(ANSWER)
        await until_async(lambda: not server.open)
        await ask(pool)
        assert server.connections == 2

    play(always(ANSWER), scene)


def test_who_stops_waiting_leaves_no_connection_behind() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        asking = asyncio.create_task(ask(pool))
        await until_async(lambda: len(server.requests) > 0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until_async(lambda: not server.open)
        server.script = always(ANSWER)
        assert (await ask(pool)).body == BODY

    play(always(ANSWER[:-1]), scene)


def test_a_silent_server_is_waited_for_so_long() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        for _ in range(2):
            with pytest.raises(ReadTimeout):
                await ask(pool)
        assert server.connections == 2

    play(always(ANSWER[:-1]), scene, limits=OriginSettings(read_timeout=0.05))


def test_what_is_not_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "IDLE_SECONDS", 0.05)

    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        await ask(pool)
        await until_async(lambda: not server.open)
        assert not pool._connections

    play(always(ANSWER), scene)


def test_there_are_as_many_connections_as_allowed_and_whoever_waits_gets_one() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        asking = [asyncio.create_task(pool.send_request(b"GET / HTTP/1.1\r\n\r\n", 200)) for _ in range(50)]
        await until_async(lambda: len(server.requests) > 1)
        cancelled = sum(one.cancel() for one in asking[::3])
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(one, HttpResponse) for one in found) == 50 - cancelled
        assert len(pool._connections) <= 2

    play(always(ANSWER[:100], ANSWER[100:]), scene, limits=OriginSettings(max_connections=2))


def test_nobody_there() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        nobody = HttpPool(ServerAddress("127.0.0.1", free_port(), False), OriginSettings(), ClientTls(True))
        with pytest.raises(EndpointConnectionError):
            await ask(nobody)
        unnamed = HttpPool(ServerAddress("no-such-name.invalid", 80, False), OriginSettings(), ClientTls(True))
        with pytest.raises((EndpointConnectionError, ConnectTimeoutError)):
            await ask(unnamed)

    play(always(ANSWER), scene)


@pytest.mark.parametrize("dead", ["refuses", "is silent"])
def test_of_several_addresses_one_may_be_dead(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        full = socket.create_server(("127.0.0.1", 0), backlog=0)
        silent = full.getsockname()[1]
        crowd = [socket.socket() for _ in range(3)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", silent))
        ports = [free_port() if dead == "refuses" else silent, server.port]
        known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

        async def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
            return known  # type: ignore[return-value]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        assert (await ask(pool)).body == BODY
        for one in (*crowd, full):
            one.close()

    play(always(ANSWER), scene)


def test_a_server_with_an_address_of_ipv6() -> None:
    async def run() -> None:
        async with scripted(always(ANSWER), host="::1") as server:
            where = ServerAddress("::1", server.port, False)
            assert where.url == f"http://[::1]:{server.port}"
            pool = HttpPool(where, OriginSettings(), ClientTls(True))
            assert (await ask(pool)).body == BODY
            pool.close()

    virtual_time.run(run())


def test_a_server_that_does_not_answer_a_tls_handshake_is_given_up() -> None:
    async def run() -> None:
        async with scripted(always(ANSWER)) as server:
            limits = OriginSettings(connect_timeout=0.05)
            pool = HttpPool(ServerAddress("127.0.0.1", server.port, True), limits, ClientTls(True))
            with pytest.raises(ConnectTimeoutError):
                await ask(pool)
            await until_async(lambda: not server.open)
            assert (pool._connections, pool._opening_count) == (set(), 0)

    virtual_time.run(run())


def test_without_a_descriptor_the_machine_is_blamed_and_not_the_server() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                await ask(pool)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await ask(pool)).body == BODY

    play(always(ANSWER), scene)


def test_tls_with_a_session_that_goes_on() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        for _ in range(3):
            assert (await ask(pool)).body == BODY
            server.drop_all()
            await until_async(lambda: not server.open and not pool._idle_connections)
        assert (server.connections, server.resumed) == (3, 2)

    play(always(ANSWER), scene, verify=str(CERTIFICATE))


def test_a_server_that_cannot_prove_who_it_is_is_not_asked() -> None:
    async def scene(server: ScriptedServer, pool: HttpPool) -> None:
        with pytest.raises(SSLError, match="certificate verify failed"):
            await ask(pool)
        assert not server.requests

    play(always(ANSWER), scene, verify="")
