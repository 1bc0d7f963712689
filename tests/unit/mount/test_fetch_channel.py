"""The mount's end of the fetch channel, with a daemon that says what the test says."""

import errno
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from cachefs.block import MEMORY, BlockLocation
from cachefs.errors import AccessDenied, Busy, CachefsError, DaemonUnavailable
from cachefs.fetch_frames import (
    MAX_REQUEST_BYTES,
    VERSION,
    FetchRequestFrame,
    FetchResponseFrame,
    FrameSplitter,
    Hello,
    encode_frame,
    fetch_socket_path,
)
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs.mount.reads import fetch_channel
from cachefs.mount.reads.fetch_channel import FetchChannelClient
from tests.waiting import until_async

PLACE = FetchedBlock(BlockLocation(MEMORY, 1, 2, 3, bytes(8)).pack())
FETCH = FetchRequest(blocks=[BlockRef("snapshot", 1, 0)], deadline=20)


class FakeDaemon:
    """Listens on the socket."""

    def __init__(self, path: Path) -> None:
        self.path = fetch_socket_path(path)
        self.listen()

    def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self._socket = trio.socket.socket(socket.AF_UNIX)
        self._socket._sock.bind(str(self.path))
        self._socket.listen(8)

    def close(self) -> None:
        self._socket.close()

    async def accept(self, hello: bytes = encode_frame(Hello(version=VERSION))) -> "Peer":
        connection, _ = await self._socket.accept()
        peer = Peer(connection)
        assert msgspec.msgpack.decode(await peer.body(), type=Hello).version == VERSION
        await connection.send(hello)
        return peer


class Peer:
    """The daemon's end of a connection."""

    def __init__(self, connection: trio.socket.SocketType) -> None:
        self.connection = connection
        self._frames, self._bodies = FrameSplitter(MAX_REQUEST_BYTES), list[bytes]()

    async def body(self) -> bytes:
        while not self._bodies:
            data = await self.connection.recv(1 << 16)
            assert data, "the mount has hung up"
            self._bodies += self._frames.split_frames(data)
        return self._bodies.pop(0)

    async def asked(self) -> int:
        return msgspec.msgpack.decode(await self.body(), type=FetchRequestFrame).number

    async def answer(self, number: int, block: FetchedBlock = PLACE) -> None:
        await self.connection.send(encode_frame(FetchResponseFrame(number=number, blocks=[block])))


def play(directory: Path, scene: Callable[[FetchChannelClient, FakeDaemon], Awaitable[None]]) -> None:
    async def run() -> None:
        daemon, channel = FakeDaemon(directory / "s"), FetchChannelClient(directory / "s")
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.run)
                await scene(channel, daemon)
                nursery.cancel_scope.cancel()
        daemon.close()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def block(name: bytes) -> FetchedBlock:
    return FetchedBlock(name)


def test_each_question_gets_its_own_answer_in_whatever_order_they_come(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        found: dict[int, bytes] = {}

        async def ask(entry: int) -> None:
            [answer] = await channel.call(FetchRequest(blocks=[BlockRef("s", entry, 0)]), 20)
            found[entry] = answer.location

        async with trio.open_nursery() as nursery:
            peer = await daemon.accept()
            for entry in range(1000):
                nursery.start_soon(ask, entry)
            asked = [msgspec.msgpack.decode(await peer.body(), type=FetchRequestFrame) for _ in range(1000)]
            answers = [
                encode_frame(FetchResponseFrame(number=a.number, blocks=[block(b"%d" % a.request.blocks[0].entry)]))
                for a in asked
            ]
            stream = trio.SocketStream(peer.connection)
            await stream.send_all(b"".join(reversed(answers)))
        assert found == {entry: b"%d" % entry for entry in range(1000)}

    play(tmp_path, scene)


def test_a_daemon_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        peer = await daemon.accept()
        await until_async(lambda: not channel.is_disconnected)
        daemon.close()
        peer.connection.close()
        await until_async(lambda: channel.is_disconnected)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gets_its_answer, channel)
            await asks_in_vain(channel, 0.05, "did not answer in time; is it running.*older than this mount")
            daemon.listen()
            peer = await daemon.accept()
            await peer.answer(await peer.asked())

    play(tmp_path, scene)


async def gets_its_answer(channel: FetchChannelClient) -> None:
    assert await channel.call(FETCH, 20) == [PLACE]


async def asks_in_vain(channel: FetchChannelClient, seconds: float, match: str) -> None:
    with pytest.raises(DaemonUnavailable, match=match):
        await channel.call(FETCH, seconds)


def test_a_daemon_that_goes_while_somebody_waits_is_away(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        for cut in range(
            len(encode_frame(FetchResponseFrame(number=1, blocks=[PLACE])))
        ):  # bytes of the answer that still come
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asks_in_vain, channel, 20, "has gone away")
                peer = await daemon.accept()
                number = await peer.asked()
                await peer.connection.send(
                    encode_frame(FetchResponseFrame(number=number, blocks=[PLACE]))[:cut] or b"\0"
                )
                peer.connection.close()

    play(tmp_path, scene)


def test_a_reader_that_goes_away_takes_nobody_along(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        peer = await daemon.accept()
        await asks_in_vain(channel, 0.01, "did not answer in time")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gets_its_answer, channel)
            gone, there = await peer.asked(), await peer.asked()
            await peer.answer(gone, block(b"late"))
            await peer.answer(there)

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("hello", "kind", "match"),
    [
        (Hello(version=VERSION + 1), CachefsError, "unmount and mount again, or restart the daemon"),
        (Hello(version=VERSION, kind="AccessDenied", refusal="you may not"), AccessDenied, "you may not"),
        (Hello(version=VERSION, kind="Later", refusal="of a later daemon"), CachefsError, "of a later daemon"),
        (Hello(version=VERSION, kind="Path", refusal="no error"), CachefsError, "no error"),
    ],
)
def test_a_refusal_is_the_readers_at_once_and_nobodys_later(
    tmp_path: Path, hello: Hello, kind: type[CachefsError], match: str
) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(kind, match=match):
                    await channel.call(FETCH, 20)

            nursery.start_soon(refused)
            peer = await daemon.accept(encode_frame(hello))
            peer.connection.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gets_its_answer, channel)
            peer = await daemon.accept()
            await peer.answer(await peer.asked())

    play(tmp_path, scene)


def test_the_refusal_of_a_daemon_that_has_hung_up_already_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a busy machine: the daemon was done with the connection before the mount had said its Hello."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(fetch_socket_path(tmp_path / "s")))
        listening.listen()

        def refused_meanwhile(hello: Hello) -> bytes:
            with listening.accept()[0] as connection:
                connection.send(encode_frame(Hello(version=VERSION, kind="AccessDenied", refusal="you may not")))
            return encode_frame(hello)

        monkeypatch.setattr(fetch_channel, "encode_frame", refused_meanwhile)
        with pytest.raises(AccessDenied, match="you may not"):
            trio.run(fetch_channel.check_daemon, tmp_path / "s")


def test_an_answer_with_too_few_or_too_many_blocks_is_an_error(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        async def ask() -> None:
            with pytest.raises(CachefsError, match=r"has answered [02] blocks for 1"):
                await channel.call(FETCH, 20)

        peer = await daemon.accept()
        for blocks in ([], [PLACE, PLACE]):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await peer.connection.send(encode_frame(FetchResponseFrame(number=await peer.asked(), blocks=blocks)))

    play(tmp_path, scene)


def test_one_refused_question_keeps_the_daemons_reason(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(Busy, match="too many") as caught:
                    await channel.call(FETCH, 20)
                assert caught.value.errno == errno.EBUSY

            nursery.start_soon(refused)
            peer = await daemon.accept()
            number = await peer.asked()
            await peer.connection.send(
                encode_frame(FetchResponseFrame(number=number, blocks=[], kind="Busy", message="too many"))
            )

    play(tmp_path, scene)


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\0\0\0\1\xc1", b"\0\0\0\1\1", b"\0\0\0\5\x93\1\x90\xa1\x80"])
def test_an_answer_that_makes_no_sense_is_an_error_at_once(tmp_path: Path, garbage: bytes) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(CachefsError, match="have the same version"):
                    await channel.call(FETCH, 20)

            nursery.start_soon(ask)
            peer = await daemon.accept()
            await peer.asked()
            await peer.connection.send(garbage)

    play(tmp_path, scene)


def test_without_a_descriptor_a_mount_waits_for_one(tmp_path: Path) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        peer = await daemon.accept()
        await until_async(lambda: not channel.is_disconnected)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            peer.connection.close()
            await until_async(lambda: channel.is_disconnected)
            await asks_in_vain(channel, 0.3, "Too many open files")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gets_its_answer, channel)
            peer = await daemon.accept()
            await peer.answer(await peer.asked())

    play(tmp_path, scene)


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\0\0\0\1\xc1"])
def test_what_says_no_hello_is_no_daemon(tmp_path: Path, garbage: bytes) -> None:
    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(CachefsError, match=r"allowed|is not a daemon"):
                    await channel.call(FETCH, 20)

            nursery.start_soon(ask)
            await daemon.accept(garbage)

    play(tmp_path, scene)


def test_a_daemon_that_stands_still_costs_a_mount_only_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_channel, "MAX_UNSENT", 1 << 20)
    large = FetchRequest(blocks=[BlockRef("s" * 1000, 1, 0)] * 200)

    async def scene(channel: FetchChannelClient, daemon: FakeDaemon) -> None:
        failed = 0

        async def ask() -> None:
            nonlocal failed
            with pytest.raises(DaemonUnavailable):
                await channel.call(large, 20)
            failed += 1

        async with trio.open_nursery() as nursery:
            peer = await daemon.accept()
            await until_async(lambda: not channel.is_disconnected)
            for _ in range(8):
                nursery.start_soon(ask)
            channel.announce_fetch(large)
        assert failed == 8
        peer.connection.close()

    play(tmp_path, scene)
