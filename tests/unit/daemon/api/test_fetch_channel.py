"""The daemon's end of the fetch channel, on real sockets: bounds, and clients that do not keep to the rules."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.block import MEMORY, PIECE_SIZE, BlockLocation, pieces_match
from cachefs.errors import ObjectChanged
from cachefs.fetch_frames import (
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    VERSION,
    FetchRequestFrame,
    FetchResponseFrame,
    FrameSplitter,
    Hello,
    encode_frame,
)
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest, Message
from cachefs_daemon.api import fetch_channel
from cachefs_daemon.api.fetch_channel import FetchChannelServer
from cachefs_daemon.api.identity import CallerRights
from cachefs_daemon.fetch.block_fetch import BlockResult, BypassBlock
from cachefs_daemon.fetch.concurrency_limiter import REQUESTER
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.error_log import ErrorLog
from tests import virtual_time
from tests.waiting import until_async

PLACE = BlockLocation(MEMORY, 1, 2, 3, bytes(8))
REF = BlockRef("snapshot", 1, 0)
OTHER = BlockRef("snapshot", 2, 0)
KEY = b"k" * 16 + bytes(4)


class SlowFetcher:
    """Stands in for a Fetcher: the test says when blocks come."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[BlockRef], float, Callable[[list[BlockResult]], None]]] = []
        self.is_asked = asyncio.Event()
        self.hinted: list[BlockRef] = []
        self.askers: set[int] = set()
        self.early = False  # may the last question be answered with bytes before the block is stored?

    def request_on_demand(
        self, refs: list[BlockRef], patience: float, answer: Callable[[list[BlockResult]], None], *, may_be_early: bool
    ) -> None:
        self.early = may_be_early
        if refs[0].snapshot == "bug":
            raise ZeroDivisionError("a bug")
        self.asked.append((refs, patience, answer))
        self.is_asked.set()
        self.askers.add(REQUESTER.get())

    async def start_hinted_fetches(self, refs: list[BlockRef]) -> None:
        self.hinted += refs


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._frames, self._bodies = FrameSplitter(MAX_RESPONSE_BYTES), list[bytes | memoryview]()

    def send(self, *messages: Message) -> None:
        self.writer.write(b"".join(map(encode_frame, messages)))

    def ask(self, *numbers: int, blocks: int = 1, **fields: Any) -> None:
        self.send(
            *(FetchRequestFrame(number=n, request=FetchRequest(blocks=[REF] * blocks, **fields)) for n in numbers)
        )

    async def hello(self) -> Hello:
        return msgspec.msgpack.decode(await self._body(), type=Hello)

    async def answer(self) -> FetchResponseFrame:
        return msgspec.msgpack.decode(await self._body(), type=FetchResponseFrame)

    async def has_ended(self) -> bool:
        """Wait until the daemon hangs up. False where it says anything before."""
        try:
            return await self.reader.read(1 << 20) == b""
        except ConnectionResetError:
            return True

    async def _body(self) -> bytes | memoryview:
        while not self._bodies:
            data = await self.reader.read(1 << 20)
            assert data, "the daemon has hung up"
            self._bodies += self._frames.split_frames(data)
        return self._bodies.pop(0)


class Scene:
    """A channel, and clients of it."""

    def __init__(self, directory: Path) -> None:
        self.fetcher = SlowFetcher()
        self.errors = ErrorLog()
        self.channel = FetchChannelServer(directory / "s.ch", CallerRights(0), cast(Fetcher, self.fetcher), self.errors)
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_unix_connection(self.channel.path))
        self._clients.append(client)
        return client

    async def greeted(self) -> Client:
        client = await self.connect()
        client.send(Hello(version=VERSION))
        assert await client.hello() == Hello(version=VERSION)
        return client

    async def works(self) -> bool:
        """Is a client that keeps to the rules answered?"""
        client = await self.greeted()
        client.ask(1)
        before = len(self.fetcher.asked)
        await until_async(lambda: len(self.fetcher.asked) > before)
        self.fetcher.asked[-1][2]([PLACE])
        return await client.answer() == FetchResponseFrame(number=1, blocks=[FetchedBlock(PLACE.pack())])

    def close(self) -> None:
        for client in self._clients:
            client.writer.close()


def play(directory: Path, scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        played = Scene(directory)
        await played.channel.start()
        try:
            await asyncio.wait_for(scene(played), 30)
        finally:
            played.close()
            await played.channel.stop(0.01)

    virtual_time.run(run())


def test_answers_come_in_any_order_and_keep_their_numbers(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        client = await scene.greeted()
        client.ask(*range(100), deadline=40.0)
        await until_async(lambda: len(scene.fetcher.asked) == 100)
        assert {patience for _, patience, _ in scene.fetcher.asked} == {39.0}
        for _, _, answer in reversed(scene.fetcher.asked):
            answer([PLACE])
        assert [(await client.answer()).number for _ in range(100)] == list(reversed(range(100)))

    play(tmp_path, scene)


def test_each_connection_asks_for_itself(tmp_path: Path) -> None:
    """So that they take turns."""

    async def scene(scene: Scene) -> None:
        for client in [await scene.greeted() for _ in range(3)]:
            client.ask(1, 2)
        await until_async(lambda: len(scene.fetcher.asked) == 6)
        assert len(scene.fetcher.askers - {0}) == 3

    play(tmp_path, scene)


def test_what_a_block_has_become_is_said(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        client = await scene.greeted()
        data = bytes(range(256)) * 1024
        refs = [REF, REF, BlockRef("s", 1, 0, start=PIECE_SIZE + 5, size=10), REF]
        client.send(FetchRequestFrame(number=1, request=FetchRequest(blocks=refs)))
        await until_async(lambda: bool(scene.fetcher.asked))
        passing = BypassBlock.of(KEY, data)
        scene.fetcher.asked[0][2]([PLACE, ObjectChanged("it has changed"), passing, passing])
        place, changed, passed, unasked = (await client.answer()).blocks
        assert BlockLocation.unpack(place.location) == PLACE
        assert (changed.errno, changed.message) == (ObjectChanged.errno, "it has changed")
        assert passed.data == data[PIECE_SIZE : 2 * PIECE_SIZE]
        assert pieces_match(KEY, passed.checksums, 1, memoryview(passed.data))
        assert "accepts no bytes" in unasked.message

    play(tmp_path, scene)


def test_nobody_waits_for_what_is_asked_for_ahead(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        client = await scene.greeted()
        client.ask(1, ahead=True)
        assert await client.answer() == FetchResponseFrame(number=1, blocks=[])
        assert (scene.fetcher.hinted, scene.fetcher.asked) == ([REF], [])

    play(tmp_path, scene)


def test_a_bug_is_told_to_the_client_and_harms_no_other_question(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        client = await scene.greeted()
        client.send(FetchRequestFrame(number=1, request=FetchRequest(blocks=[BlockRef("bug", 1, 0)])))
        answer = await client.answer()
        assert (answer.kind, "internal error" in answer.message) == ("CachefsError", True)
        client.ask(2)
        await until_async(lambda: len(scene.fetcher.asked) == 1)

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(4),
        b"\xff\xff\xff\xff" + bytes(100),
        (MAX_REQUEST_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\1\xc1",
        b"\0\0\0\1\x01",
        encode_frame(Hello(version=VERSION)),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\3\x92\1\xc1",
        encode_frame(FetchRequestFrame(number=1, request=FetchRequest(blocks=[REF]))).replace(
            b"snapshot", b"\x80napshot"
        ),
    ],
)
def test_garbage_ends_the_connection_with_one_line(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(scene: Scene) -> None:
        for _ in range(3):
            client = await scene.greeted()
            client.writer.write(garbage)
            assert await client.has_ended()
        assert [view.count for view in scene.errors.views()] == [3]
        assert await scene.works()

    play(tmp_path, scene)
    [line] = caplog.messages
    assert "user 0: a client sent an invalid request" in line


class Transport:
    """What asyncio gives a connection, without a loop."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self.closed = False

    def get_extra_info(self, _: str) -> socket.socket:
        return self._client

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def write(self, _: bytes) -> None:
        assert not self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


QUESTION = FetchRequestFrame(number=1, request=FetchRequest(blocks=[REF], deadline=5.0))


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.binary(min_size=1, max_size=40).map(lambda body: len(body).to_bytes(4, "big") + body),
            st.just(encode_frame(QUESTION)),
            st.tuples(st.integers(4, len(encode_frame(QUESTION)) - 1), st.integers(0, 255)).map(
                lambda change: (
                    encode_frame(QUESTION)[: change[0]] + bytes([change[1]]) + encode_frame(QUESTION)[change[0] + 1 :]
                )
            ),
        ),
        max_size=8,
    )
)
def test_whatever_a_client_sends_is_answered_or_ends_its_connection(said: list[bytes]) -> None:
    async def run() -> None:
        fetcher, errors = SlowFetcher(), ErrorLog()
        channel = FetchChannelServer(Path("/nowhere/s.ch"), CallerRights(0), cast(Fetcher, fetcher), errors)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            connection, transport = fetch_channel._Connection(channel), Transport(ours)
            connection.connection_made(transport)
            for data in (encode_frame(Hello(version=VERSION)), *said):
                connection.get_buffer(-1)[: len(data)] = data
                connection.buffer_updated(len(data))
            for refs, patience, answer in fetcher.asked:
                assert 0 <= patience <= fetch_channel.MAX_DEADLINE
                answer([PLACE] * len(refs))
            await asyncio.sleep(0)
            connection.connection_lost(None)
        assert not channel._users
        assert not channel._connections
        assert not [view for view in errors.views() if "internal error" in view.message]

    virtual_time.run(run())


def test_a_client_that_ends_within_a_question_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        for cut in range(1, len(encode_frame(QUESTION))):
            client = await scene.greeted()
            client.writer.write(encode_frame(QUESTION)[:cut])
            client.writer.close()
        await until_async(lambda: not scene.channel._connections)
        assert (scene.channel._users, scene.fetcher.asked, scene.errors.views()) == ({}, [], [])
        assert await scene.works()

    play(tmp_path, scene)


def test_of_ten_thousand_questions_each_is_answered_and_others_wait_for_few_of_them(tmp_path: Path) -> None:
    many = 10_000

    async def scene(scene: Scene) -> None:
        flood, other = [await scene.greeted() for _ in range(2)]
        flood.ask(*range(many))
        await scene.fetcher.is_asked.wait()
        other.send(FetchRequestFrame(number=1, request=FetchRequest(blocks=[OTHER])))
        await until_async(lambda: any(refs == [OTHER] for refs, _, _ in scene.fetcher.asked))
        before = [refs for refs, _, _ in scene.fetcher.asked].index([OTHER])
        assert before < 1500, "a turn of the loop takes a few hundred questions of one client"
        await until_async(lambda: len(scene.fetcher.asked) == fetch_channel.MAX_CONNECTION_BLOCKS + 1)
        refused = [await flood.answer() for _ in range(many - fetch_channel.MAX_CONNECTION_BLOCKS)]
        assert {answer.kind for answer in refused} == {"Busy"}
        for _, _, answer in scene.fetcher.asked:
            answer([PLACE])
        answered = [await flood.answer() for _ in range(fetch_channel.MAX_CONNECTION_BLOCKS)]
        assert sorted(answer.number for answer in (*refused, *answered)) == list(range(many))
        assert (await other.answer()).number == 1

    play(tmp_path, scene)


def test_answers_may_have_many_bytes(tmp_path: Path) -> None:
    size = 16 << 20
    data = bytes(range(256)) * (size >> 8)

    async def scene(scene: Scene) -> None:
        clients = [await scene.greeted() for _ in range(3)]
        for client in clients:
            client.send(
                FetchRequestFrame(number=1, request=FetchRequest(blocks=[BlockRef("s", 1, 0, start=0, size=size)]))
            )
        await until_async(lambda: len(scene.fetcher.asked) == len(clients))
        passing = BypassBlock.of(KEY, data)
        for _, _, answer in scene.fetcher.asked:
            answer([passing])
        # Whoever reads is not kept waiting by those that do not yet.
        for client in reversed(clients):
            [block] = (await client.answer()).blocks
            assert block.data == data
        assert await scene.works()

    play(tmp_path, scene)


def test_who_waits_for_few_blocks_may_get_their_bytes_at_once(tmp_path: Path) -> None:
    most = fetch_channel._MAX_EARLY

    async def scene(scene: Scene) -> None:
        client = await scene.greeted()
        for number in range(most + 1):
            assert scene.fetcher.early == (number > 0)
            client.ask(number)
            await until_async(lambda: len(scene.fetcher.asked) == number + 1)  # noqa: B023
        assert not scene.fetcher.early, "many answers with bytes would have to wait for the client"
        scene.fetcher.asked[0][2]([PLACE])
        scene.fetcher.asked[1][2]([PLACE])
        client.ask(most + 1)
        await until_async(lambda: len(scene.fetcher.asked) == most + 2)
        assert scene.fetcher.early

    play(tmp_path, scene)


def test_another_version_is_told_what_to_do(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        client = await scene.connect()
        client.send(Hello(version=VERSION + 1))
        client.ask(1)
        assert (await client.hello()).version == VERSION
        assert await client.has_ended()
        assert not scene.fetcher.asked
        [view] = scene.errors.views()
        assert "unmount and mount again" in view.message

    play(tmp_path, scene)


def test_who_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_channel, "HELLO_SECONDS", 0.01)

    async def scene(scene: Scene) -> None:
        client = await scene.connect()
        await client.hello()
        assert await client.has_ended()
        assert not scene.errors.views()

    play(tmp_path, scene)


def test_who_may_not_mount_gets_nothing_but_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(scene: Scene) -> None:
        monkeypatch.setattr(fetch_channel, "peer_credentials", lambda _: (4321, {4321}))
        client = await scene.connect()
        client.send(Hello(version=VERSION))
        client.ask(1)
        hello = await client.hello()
        assert hello.kind == "AccessDenied"
        assert hello.refusal.startswith("user 4321 may not mount: only root")
        assert await client.has_ended()
        assert not scene.fetcher.asked
        monkeypatch.undo()
        assert await scene.works()

    play(tmp_path, scene)


def test_one_user_has_only_so_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_channel, "MAX_CONNECTIONS", 3)

    async def scene(scene: Scene) -> None:
        clients = [await scene.greeted() for _ in range(3)]
        surplus = await scene.connect()
        hello = await surplus.hello()
        assert (hello.kind, "3 connections" in hello.refusal) == ("Busy", True)
        assert await surplus.has_ended()
        clients[0].writer.close()
        await until_async(lambda: scene.channel._users[0].connections == 2)
        assert await scene.works()

    play(tmp_path, scene)


def test_one_user_and_one_connection_wait_for_only_so_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_channel, "MAX_CONNECTION_BLOCKS", 4)
    monkeypatch.setattr(fetch_channel, "MAX_USER_BLOCKS", 6)

    async def scene(scene: Scene) -> None:
        first, second = [await scene.greeted() for _ in range(2)]
        first.ask(1, blocks=4)
        first.ask(2)
        refused = await first.answer()
        assert (refused.number, refused.kind, "4 blocks already" in refused.message) == (2, "Busy", True)
        second.ask(1, 2, 3)
        refused = await second.answer()
        assert (refused.number, refused.kind, "6 blocks already" in refused.message) == (3, "Busy", True)
        # What they wait for counts until it comes, also where they have gone.
        first.writer.close()
        await until_async(lambda: scene.channel._users[0].connections == 1)
        assert scene.channel._users[0].blocks == 6
        for refs, _, answer in scene.fetcher.asked:
            answer([PLACE] * len(refs))
        second.writer.close()
        await until_async(lambda: not scene.channel._users)

    play(tmp_path, scene)


def test_who_does_not_read_its_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_channel, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(fetch_channel, "MAX_UNREAD", 4 << 20)
    wanted = BlockRef("s", 1, 0, start=0, size=1 << 20)

    async def scene(scene: Scene) -> None:
        passing = BypassBlock.of(KEY, bytes(1 << 20))
        for answers in (1, 7):  # too slow; too many
            client = await scene.greeted()
            scene.fetcher.asked.clear()
            client.send(*(FetchRequestFrame(number=n, request=FetchRequest(blocks=[wanted])) for n in range(answers)))
            await until_async(lambda: len(scene.fetcher.asked) == answers)  # noqa: B023
            cast(asyncio.Transport, client.writer.transport).pause_reading()
            for _, _, answer in scene.fetcher.asked:
                answer([passing])
            await until_async(lambda: not scene.channel._connections)
        [view] = scene.errors.views()
        assert (view.count, view.message) == (2, "a client does not read its answers: 4 MiB of them wait")
        assert await scene.works()

    play(tmp_path, scene)


def test_what_all_clients_of_a_user_leave_unread_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_channel, "MAX_USER_UNREAD", 4 << 20)
    wanted = BlockRef("s", 1, 0, start=0, size=1 << 20)

    async def scene(scene: Scene) -> None:
        passing = BypassBlock.of(KEY, bytes(1 << 20))
        for client in [await scene.greeted() for _ in range(8)]:
            client.send(*(FetchRequestFrame(number=n, request=FetchRequest(blocks=[wanted])) for n in range(2)))
            cast(asyncio.Transport, client.writer.transport).pause_reading()
        await until_async(lambda: len(scene.fetcher.asked) == 16)
        for _, _, answer in scene.fetcher.asked:
            answer([passing])
            held = sum(connection.unread_bytes for connection in scene.channel._connections)
            assert held <= (4 << 20) + (8 << 20), "one answer each more than that"
        await until_async(lambda: len(scene.channel._connections) < 8)
        [view] = scene.errors.views()
        assert "4 MiB of them wait" in view.message
        assert await scene.works()

    play(tmp_path, scene)


def test_questions_for_more_bytes_than_an_answer_has_are_refused(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        client = await scene.greeted()
        client.send(FetchRequestFrame(number=1, request=FetchRequest(blocks=[BlockRef("s", 1, 0, size=1 << 40)])))
        assert (await client.answer()).kind == "ConfigError"
        assert await scene.works()

    play(tmp_path, scene)


def test_at_the_end_those_who_wait_are_answered_and_nobody_else(tmp_path: Path) -> None:
    async def scene(scene: Scene) -> None:
        idle, waiting, hopeless = [await scene.greeted() for _ in range(3)]
        waiting.ask(1)
        hopeless.ask(1)
        await until_async(lambda: len(scene.fetcher.asked) == 2)
        stopped = asyncio.create_task(scene.channel.stop(0.2))
        assert await idle.has_ended()
        with pytest.raises(FileNotFoundError):
            await scene.connect()
        waiting.ask(2)
        scene.fetcher.asked[0][2]([PLACE])
        assert (await waiting.answer()).number == 1
        assert await waiting.has_ended()
        await stopped
        assert await hopeless.has_ended()
        assert len(scene.fetcher.asked) == 2
        assert not scene.channel.path.exists()

    play(tmp_path, scene)
