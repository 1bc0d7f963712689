"""What is read over HTTP on this machine: who is answered, and what."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from cachefs.errors import CachefsError, ConfigError
from cachefs_daemon.api import local_http
from cachefs_daemon.api.local_http import LocalHttpServer
from tests import virtual_time


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def broken(_: web.Request) -> web.Response:
    raise ValueError("a bug")


def serve(work: Callable[[LocalHttpServer], Awaitable[None]], listen: str = "127.0.0.1:0") -> None:
    async def run() -> None:
        local = LocalHttpServer(listen, "metrics.listen")
        local.add_route("/hello", hello)
        local.add_route("/broken", broken)
        await local.start()
        try:
            await work(local)
        finally:
            await local.stop()

    virtual_time.run(asyncio.wait_for(run(), 30))


async def ask(
    local: LocalHttpServer, path: str = "/hello", method: str = "GET", host: str = "localhost"
) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{local.port}{path}", headers={"Host": host}) as answer,
    ):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        return answer.status, await answer.text()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9568", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80"])
def test_names_of_this_machine_are_answered(host: str) -> None:
    async def work(local: LocalHttpServer) -> None:
        assert await ask(local, host=host) == (200, "hello")

    serve(work)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9568", "10.0.0.1", "localhost.evil.example", "[fe80::1]:80"]
)
def test_a_page_of_another_site_is_not(host: str) -> None:
    async def work(local: LocalHttpServer) -> None:
        status, said = await ask(local, host=host)
        assert (status, "name of loopback" in said) == (403, True)

    serve(work)


def test_nothing_can_be_changed_and_bugs_are_not_shown() -> None:
    async def work(local: LocalHttpServer) -> None:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await ask(local, method=method))[0] == 405
        assert (await ask(local, method="HEAD"))[0] == 200
        assert (await ask(local, "/nothing"))[0] == 404
        status, said = await ask(local, "/broken")
        assert (status, "a bug" in said) == (500, False)

    serve(work)


def test_who_holds_connections_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(local: LocalHttpServer) -> None:
        held = [await asyncio.open_connection("127.0.0.1", local.port) for _ in range(local_http.MAX_CONNECTIONS + 5)]
        assert await ask(local) == (200, "hello")
        assert await asyncio.wait_for(held[0][0].read(), 10) == b"", "the oldest is closed"
        monkeypatch.setattr(local_http, "CONNECTION_SECONDS", 0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", local.port)
        writer.write(b"GET /hello HTTP/1.1\r\n")  # and no more
        assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, one in [*held, (reader, writer)]:
            one.close()

    serve(work)


def test_nonsense_is_refused() -> None:
    async def work(local: LocalHttpServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", local.port)
        writer.write(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert b"400" in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert await ask(local) == (200, "hello")

    serve(work)


def test_a_socket_asks_for_no_name(tmp_path: Path) -> None:
    path = tmp_path / "m"

    async def work(_: LocalHttpServer) -> None:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
            session.get("http://metrics/hello") as answer,
        ):
            assert await answer.text() == "hello"

    serve(work, f"unix:{path}")
    assert not path.exists()
    path.touch()
    with pytest.raises(CachefsError, match="is not a socket; remove it"):
        serve(work, f"unix:{path}")


def test_a_port_that_is_taken_is_said() -> None:
    async def work(local: LocalHttpServer) -> None:
        with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: .*see `web.listen`"):
            await LocalHttpServer(f"127.0.0.1:{local.port}", "web.listen").start()

    serve(work)
