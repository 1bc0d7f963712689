"""Credentials that expire, are replaced, or are withdrawn, and clients that are shared and closed."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from botocore.exceptions import NoCredentialsError

from cachefs.errors import OriginAccessDenied
from cachefs.messages import OriginOptions
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings, PreconnectingOrigin
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3 import connection as s3_connection
from cachefs_daemon.origin.s3 import credentials as s3_credentials
from cachefs_daemon.origin.s3.connection import shared_connection

WANTED = ObjectRange(b"key", b"e", 5, 0, 5)


class KeyedServer:
    """Serves one object to whoever signs with a key that it takes. It does not check signatures."""

    def __init__(self) -> None:
        self.refuses: dict[str, str] = {}  # access key, or path -> code of the error
        self.seen: list[str] = []  # the access key of each request
        self.endpoint = ""

    async def answer(self, request: web.Request) -> web.Response:
        key = request.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        self.seen.append(key)
        if code := self.refuses.get(key) or self.refuses.get(request.path):
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
            return web.Response(status=400, content_type="application/xml", text=text)
        return web.Response(body=b"hello", headers={"ETag": '"e"'})


@asynccontextmanager
async def serving() -> AsyncIterator[KeyedServer]:
    server = KeyedServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


class Credentials:
    """The file with the daemon's credentials."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def withdraw(self) -> None:
        self._path.unlink()

    def set(self, key: str) -> None:
        self._path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\naws_session_token={key}\n")


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(s3_connection, "RENEW_SECONDS", 0)
    found = Credentials(tmp_path / "credentials")
    found.set("old")
    return found


def scene(play: Callable[[KeyedServer, Origin], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving() as server:
            origin = open_origin("s3://bucket", OriginOptions(endpoint_url=server.endpoint), OriginSettings())
            try:
                await asyncio.wait_for(play(server, origin), 30)
            finally:
                await origin.close()

    asyncio.run(run())


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"])
def test_credentials_that_were_replaced_are_read_again(credentials: Credentials, code: str) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        assert await origin.read(WANTED, Deadline.after(20)) == b"hello"
        server.refuses["old"] = code
        credentials.set("new")
        both = [origin.read(WANTED, Deadline.after(20)) for _ in range(2)]
        assert await asyncio.gather(*both) == [b"hello", b"hello"]
        assert server.seen[0] == "old"
        assert server.seen[-1] == "new"

    scene(play)


def test_whoever_renews_expired_credentials_may_be_late(credentials: Credentials) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        server.refuses["old"] = "ExpiredToken"
        patience = Deadline.after(20)
        reading = asyncio.create_task(origin.read(WANTED, patience))
        while not patience.last_error:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "expired" in str(patience.last_error)
        credentials.set("new")
        assert await reading == b"hello"

    scene(play)


def test_wrong_credentials_fail_at_once(credentials: Credentials) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        server.refuses["old"] = "InvalidAccessKeyId"
        with pytest.raises(OriginAccessDenied):
            await origin.read(WANTED, Deadline.after(20))
        assert server.seen == ["old"]

    scene(play)


def test_datasets_that_are_reached_alike_share_a_client_which_the_last_one_closes(credentials: Credentials) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        options = OriginOptions(endpoint_url=server.endpoint)
        other = open_origin("s3://other", options, OriginSettings())
        shared = shared_connection(options, OriginSettings())
        clients = []
        for one in (origin, other):
            assert await one.read(WANTED, Deadline.after(20)) == b"hello"
            async with shared.client() as client:
                clients.append(client)
        assert clients[0] is clients[1]
        await other.close()
        assert await origin.read(WANTED, Deadline.after(20)) == b"hello"
        different = OriginOptions(endpoint_url=server.endpoint, region="eu-west-1")
        assert shared_connection(different, OriginSettings()) is not shared

    scene(play)


def test_a_client_that_nobody_uses_is_closed_and_made_again(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_connection, "IDLE_SECONDS", 0)

    async def play(server: KeyedServer, origin: Origin) -> None:
        shared = shared_connection(OriginOptions(endpoint_url=server.endpoint), OriginSettings())
        await origin.read(WANTED, Deadline.after(20))
        while shared._current is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await origin.read(WANTED, Deadline.after(20)) == b"hello"

    scene(play)


def test_what_is_prepared_has_asked_the_server_nothing(credentials: Credentials) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        assert isinstance(origin, PreconnectingOrigin)
        await origin.preconnect()
        shared = shared_connection(OriginOptions(endpoint_url=server.endpoint), OriginSettings())
        prepared = shared._current
        assert prepared is not None
        assert not server.seen
        assert await origin.read(WANTED, Deadline.after(20)) == b"hello"
        assert shared._current is prepared

    scene(play)


def test_where_preparing_fails_reads_go_on(credentials: Credentials) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        assert isinstance(origin, PreconnectingOrigin)
        credentials.withdraw()
        with pytest.raises(NoCredentialsError):
            await origin.preconnect()
        credentials.set("new")
        assert await origin.read(WANTED, Deadline.after(20)) == b"hello"

    scene(play)


class Program:
    """A program that gives credentials, which botocore renews each time they are asked for: they end in 9 minutes."""

    def __init__(self, directory: Path) -> None:
        self._answer = directory / "answer"
        self.config = directory / "config"
        self.config.write_text(f"[default]\ncredential_process = cat {self._answer}\n")

    def gives(self, key: str) -> None:
        end = datetime.now(UTC) + timedelta(minutes=9)
        fields = {"AccessKeyId": key, "SecretAccessKey": "x", "SessionToken": key, "Expiration": end.isoformat()}
        self.says(json.dumps({"Version": 1, **fields}))

    def says(self, text: str) -> None:
        new = self._answer.with_name("new")
        new.write_text(text)
        new.replace(self._answer)

    def hangs(self) -> None:
        self._answer.unlink(missing_ok=True)
        os.mkfifo(self._answer)

    def end(self) -> None:
        """Programs that hang end."""
        if self._answer.is_fifo():
            os.close(os.open(self._answer, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def program(tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    found = Program(tmp_path)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(found.config))
    monkeypatch.setattr(s3_credentials, "FRESH_SECONDS", 0)
    found.gives("first")
    yield found
    found.end()


async def read(origin: Origin, seconds: float = 20) -> None:
    assert await origin.read(WANTED, Deadline.after(seconds)) == b"hello"


def test_tokens_that_rotate_are_taken_up_before_the_old_ones_end(program: Program) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        await read(origin)
        program.gives("second")
        while server.seen[-1] != "second":
            await read(origin)
        assert set(server.seen) == {"first", "second"}
        assert origin.errors == 0

    scene(play)


@pytest.mark.parametrize("trouble", ["hangs", "says nonsense", "says nothing"])
def test_while_credentials_are_good_nobody_waits_for_others(
    program: Program, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        await read(origin)
        if trouble == "hangs":
            program.hangs()
        else:
            program.says("{" if trouble == "says nonsense" else "")
        for _ in range(5):
            await read(origin)
        assert set(server.seen) == {"first"}
        program.end()
        program.gives("second")
        while server.seen[-1] != "second":
            await read(origin)
        assert origin.errors == 0

    scene(play)
    assert sum("cannot be renewed" in line for line in caplog.messages) <= 1


@pytest.mark.parametrize(("trouble", "said"), [("hangs", "no answer within 0.05"), ("nonsense", "JSONDecodeError")])
def test_without_any_credentials_the_reason_is_said(
    program: Program, trouble: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        if trouble == "hangs":
            monkeypatch.setattr(s3_credentials, "_TIMEOUT", 0.05)
            program.hangs()
        else:
            program.says("{")
        with pytest.raises(OriginAccessDenied, match=said):
            await read(origin, 0.5 if trouble == "hangs" else 3)
        assert not server.seen
        monkeypatch.setattr(s3_credentials, "_TIMEOUT", 20)
        program.end()
        program.gives("second")
        await read(origin)

    scene(play)


def test_who_is_refused_holds_up_nobody_else(program: Program) -> None:
    """The provider hangs while it is asked for other credentials."""

    async def play(server: KeyedServer, origin: Origin) -> None:
        await read(origin)
        server.refuses["/bucket/refused"] = "InvalidAccessKeyId"
        program.hangs()
        refused = asyncio.create_task(origin.read(replace(WANTED, key=b"refused"), Deadline.after(60)))
        while len(server.seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for _ in range(5):
            await asyncio.wait_for(read(origin), 10)
            await asyncio.sleep(0.01)
        assert not refused.done()
        program.end()
        program.gives("first")
        with pytest.raises(OriginAccessDenied):
            await refused

    scene(play)


def test_credentials_that_end_while_their_provider_hangs_are_not_used_for_ever(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(server: KeyedServer, origin: Origin) -> None:
        await read(origin)
        monkeypatch.setattr(s3_credentials, "_VALID_SECONDS", 0)
        monkeypatch.setattr(s3_credentials, "_TIMEOUT", 0.05)
        program.hangs()
        with pytest.raises(OriginAccessDenied, match=r"cannot be renewed.*no answer within"):
            await read(origin, 0.5)
        assert server.seen == ["first"]
        program.end()
        program.gives("second")
        await read(origin)

    scene(play)
