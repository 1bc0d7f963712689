"""Who may ask, and what others see of it (M7): mutual TLS, and servers that strangers keep busy."""

import asyncio
import dataclasses
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cachefs.block import piece_checksums
from cachefs_cluster.membership.handshake import Greeting
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.peers import protocol
from cachefs_cluster.peers.peer_requests import FailureKind, PeerBlock, PeerRequestFailed
from cachefs_cluster.peers.server import CONNECTION_BOUNDS
from cachefs_cluster.peers.tls import Certificates
from tests.blockstore import data_of
from tests.certificates import Authority
from tests.peering import DEADLINE, ME, ServingNode, asker, node_id, record, wanted
from tests.waiting import until_async

SIZE = 100_000


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@asynccontextmanager
async def tapped(port: int) -> AsyncIterator[tuple[int, bytearray]]:
    """A port from which everything goes to that one and back, and what has gone through."""
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to_writer), pump(to_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


def _shows(seen: bytes, data: bytes) -> bool:
    """Is any part of the data in what was seen?"""
    return any(data[at : at + 32] in seen for at in range(0, len(data) - 32, 1000))


@pytest.mark.parametrize("encrypted", [False, True])
def test_wire_shows_no_payload_with_tls(root: Path, authority: Authority, encrypted: bool) -> None:
    mine, theirs = (authority.issue(name) if encrypted else None for name in ("asker", "node-1"))

    async def run() -> None:
        async with ServingNode(root, tls=theirs) as node, tapped(node.servers.port) as (port, seen):
            node.put(*range(5))
            through = dataclasses.replace(node.record, data_port=port)
            async with asker(through, tls=mine) as one:
                answers = await asyncio.gather(*(one.begin(through, wanted(number)) for number in range(5)))
            for number, answer in enumerate(answers):
                assert isinstance(answer, PeerBlock), answer
                assert bytes(answer.data) == data_of(number)
            assert len(seen) > 5 * SIZE
            # Without TLS the same scan finds the blocks, the keys and who asks.
            shown = [_shows(seen, data_of(number)) for number in range(5)]
            assert shown == [not encrypted] * 5
            assert (ME.encode() in seen) is not encrypted

    asyncio.run(run())


def test_large_blocks_and_many_of_them_come_over_tls(root: Path, authority: Authority) -> None:
    async def run() -> None:
        async with ServingNode(root, tls=authority.issue("node-1", alternative=False)) as node:
            node.put(*range(8), size=256 << 10)
            async with asker(node.record, tls=authority.issue("asker")) as one:
                asks = [one.begin(node.record, wanted(number, 256 << 10)) for number in range(8)] * 2
                for number, answer in enumerate(await asyncio.gather(*asks)):
                    assert isinstance(answer, PeerBlock)
                    assert bytes(answer.data) == data_of(number % 8, 256 << 10)

    asyncio.run(run())


def test_strangers_are_refused_each_with_a_line(root: Path, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    good = authority.issue("asker")
    nobody = authority.issue("mallory")

    async def run() -> None:
        async with ServingNode(root, tls=authority.issue("node-1")) as node:
            node.put(1)

            async def refused(files: ssl.SSLContext) -> None:
                """It gets no byte of an answer."""

                def talk() -> bytes:
                    link = socket.create_connection(("127.0.0.1", node.servers.port), DEADLINE)
                    with link, files.wrap_socket(link) as tls:
                        tls.sendall(b"GET /health HTTP/1.1\r\n\r\n")
                        return tls.recv(100)

                with suppress(ssl.SSLError, ConnectionError):
                    assert await asyncio.to_thread(talk) == b""

            without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
            await refused(without)
            await until_async(lambda: "peer did not return a certificate" in node.complaints(), "a line")

            foreign = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            foreign.check_hostname, foreign.verify_mode = False, ssl.CERT_NONE
            files = other.issue("asker")
            foreign.load_cert_chain(files.cert, files.key)
            await refused(foreign)
            await until_async(lambda: "unable to get local issuer certificate" in node.complaints(), "a line")

            await refused(Certificates(nobody).client_context())
            await until_async(
                lambda: "certificate names mallory, which is no member of cluster test" in node.complaints(), "a line"
            )

            # A member that says it is another one.
            async with asker(node.record, tls=good) as one:
                assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
                one.membership.view = dataclasses.replace(one.membership.view, me=node_id(1))
                answer = await one.ask(node.record, wanted(1))
                assert isinstance(answer, PeerRequestFailed)
                assert answer.kind == FailureKind.REFUSED

    asyncio.run(run())


def test_client_refuses_a_server_that_is_somebody_else(root: Path, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")

    async def run() -> None:
        for files, expected in (
            (authority.issue("node-2"), "names node-2, and not node-1"),
            (other.issue("node-1"), "TLS with node node-1"),
            (None, "TLS with node node-1"),
        ):
            mine = authority.issue("asker")
            async with ServingNode(root, tls=files) as node, asker(node.record, tls=mine) as one:
                answer = await one.ask(node.record, wanted(1))
                assert isinstance(answer, PeerRequestFailed)
                assert expected in answer.reason
                assert expected in one.complaints()
            shutil.rmtree(root / "state")

    asyncio.run(run())


def test_new_certificates_are_used_without_a_restart(root: Path, authority: Authority, tmp_path: Path) -> None:
    """Also those of a new authority."""
    files = authority.issue("node-1")
    mine = authority.issue("asker")
    later = Authority(tmp_path / "later")

    async def run() -> None:
        async with ServingNode(root, tls=files) as node:
            node.put(1)
            async with asker(node.record, tls=mine) as one:
                assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            new, mine_new = later.issue("node-1"), later.issue("asker")
            for source, target in ((new.cert, files.cert), (new.key, files.key), (new.ca, files.ca)):
                shutil.copy(source, target)
            end = time.monotonic() + DEADLINE
            while True:
                async with asker(node.record, tls=mine_new) as one:
                    if isinstance(await one.ask(node.record, wanted(1)), PeerBlock):
                        break
                assert time.monotonic() < end
                await asyncio.sleep(0.1)

    asyncio.run(run())


def test_flood_and_slow_requests_cost_only_who_sends_them(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(*range(8))
            assert isinstance(await one.ask(node.record, wanted(0)), PeerBlock)
            links = []
            for _ in range(CONNECTION_BOUNDS.unknown_of_address + 20):
                link = socket.create_connection(("127.0.0.1", node.servers.port), DEADLINE)
                link.sendall(b"POST /blocks HTTP/1.1\r\nX-Slow: ")
                links.append(link)
            await until_async(lambda: "closing the oldest" in node.complaints(), "a line")
            # Who is a member already goes on, and another connection of one comes in.
            for number in range(8):
                assert isinstance(await one.ask(node.record, wanted(number)), PeerBlock)
            async with asker(node.record) as another:
                assert isinstance(await another.ask(node.record, wanted(0)), PeerBlock)
            for link in links:
                link.settimeout(DEADLINE)
                received = await asyncio.to_thread(_receive, link)
                assert received in (b"", None), received
                link.close()

    asyncio.run(run())


def _receive(link: socket.socket) -> bytes | None:
    try:
        return link.recv(100)
    except ConnectionError:
        return None


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /blocks HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST /blocks HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n", 413),
        (b"POST /blocks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /blocks HTTP/1.1\r\nX-Cachefs-From: me\r\n\r\n", 400),
        (b"POST /blocks HTTP/1.1\r\nX: " + b"a" * 10_000, 431),
    ],
)
def test_what_is_no_request_is_answered_so_and_told(
    root_of_module: "ServingNodes", request_: bytes, status: int
) -> None:
    answer = root_of_module.talk(request_)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


class ServingNodes:
    """One node for several tests."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def talk(self, request_: bytes) -> bytes:
        async def run() -> bytes:
            async with ServingNode(self._root) as node:
                reader, writer = await asyncio.open_connection("127.0.0.1", node.servers.port)
                writer.write(request_)
                answer = await asyncio.wait_for(reader.read(), DEADLINE)
                writer.close()
                return answer

        return asyncio.run(run())


@pytest.fixture
def root_of_module(root: Path) -> ServingNodes:
    return ServingNodes(root)


def test_with_a_secret_only_those_who_know_it_are_answered_and_believed(root: Path) -> None:
    key, other = ClusterSecret(b"0123456789abcdef"), ClusterSecret(b"another-secret-of-it")

    async def scenario() -> None:
        async with ServingNode(root, secret=key) as node:
            node.put(1)
            async with asker(node.record, secret=key) as friend:
                answer = await friend.ask(node.record, wanted(1))
                assert isinstance(answer, PeerBlock)
                assert bytes(answer.data) == data_of(1, SIZE)
            # Of a static list nobody knows the incarnation at first.
            fresh = dataclasses.replace(node.record, incarnation="")
            async with asker(fresh, secret=key) as friend:
                first = await friend.ask(fresh, wanted(1))
                known = friend.membership.heard_of[node.record.id]
                assert known == node.record.incarnation
                assert isinstance(first, PeerBlock | PeerRequestFailed)
            for wrong in (other, None):
                async with asker(node.record, secret=wrong) as stranger:
                    refused = await stranger.ask(node.record, wanted(1))
                    assert isinstance(refused, PeerRequestFailed)
                    assert "cluster.secret_file" in refused.reason
            await until_async(lambda: "another secret" in node.complaints(), "the server says whom it has refused")
        async with ServingNode(root / "plain") as impostor:
            impostor.put(1)
            async with asker(impostor.record, secret=key) as deceived:
                refused = await deceived.ask(impostor.record, wanted(1))
                assert isinstance(refused, PeerRequestFailed)
                assert "does not prove that it knows this cluster's secret" in refused.reason

    asyncio.run(scenario())


async def _said(port: int, request: bytes) -> bytes:
    """Send a request there, as any user of the machine can, and return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), DEADLINE)
    finally:
        writer.close()


def _head_of(answer: bytes, name: str) -> str:
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}.get(name, "")


@pytest.mark.parametrize("answers_as", ["itself", "the one that is down"])
@pytest.mark.parametrize("relayed_to", ["another node", "the same node, started again elsewhere"])
@pytest.mark.parametrize("request_of", ["the sender", "the thief"])
def test_what_a_live_node_says_to_another_user_makes_no_answer_of_a_node_that_is_down(
    root: Path, answers_as: str, relayed_to: str, request_of: str
) -> None:
    key, wrong = ClusterSecret(b"0123456789abcdef"), b"evil" * (SIZE // 4)

    async def scenario() -> None:
        number = 2 if relayed_to == "another node" else 1
        async with ServingNode(root, number=number, secret=key) as live:
            asked: list[bytes] = []

            async def steal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                """Listen on the port of a node that is down, and answer with a live node's proof."""
                request = await reader.readuntil(b"\r\n\r\n")
                asked.append(request)
                me, nonce = _head_of(request, "x-cachefs-from"), _head_of(request, "x-cachefs-nonce")
                if request_of == "the thief":
                    greeting = Greeting(
                        _head_of(request, "x-cachefs-cluster"), me, live.record.id, live.record.incarnation, 7,
                        nonce=nonce, proof="0" * 64,
                    )  # fmt: skip
                    forwarded = protocol.encode_probe(greeting)
                else:
                    forwarded = request.replace(b"POST /blocks", b"GET /health")
                    forwarded = forwarded.replace(b"Content-Length", b"X-Length").replace(
                        b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"
                    )
                proof = _head_of(await _said(live.record.data_port, forwarded), "x-cachefs-proof")
                node = live.record if answers_as == "itself" else down
                checksums = piece_checksums(wanted(1).key, wrong)
                writer.write(
                    protocol.response_head(node.id, node.incarnation, 7, proof)
                    + protocol.block_start(0, 0, len(wrong), checksums)
                    + wrong
                    + protocol.block_end(stayed=True)
                    + protocol.last_chunk(0)
                )
                await writer.drain()
                writer.close()

            thief = await asyncio.start_server(steal, "127.0.0.1", 0)
            port = thief.sockets[0].getsockname()[1]
            down = dataclasses.replace(live.record, id=node_id(1), incarnation="e" * 16, data_port=port)
            async with asker(down, secret=key) as deceived:
                answer = await deceived.ask(down, wanted(1))
            thief.close()
            assert asked, "the thief is asked"
            assert isinstance(answer, PeerRequestFailed)

    asyncio.run(scenario())


def test_blocks_of_another_node_are_no_answer_also_without_a_secret(root: Path) -> None:
    async def scenario() -> None:
        async def answer_as_another(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            data = data_of(1, SIZE)
            writer.write(
                protocol.response_head(node_id(3), "f" * 16, 7)
                + protocol.block_start(0, 0, SIZE, piece_checksums(wanted(1).key, data))
                + data
                + protocol.block_end(stayed=True)
                + protocol.last_chunk(0)
            )
            await writer.drain()
            writer.close()

        other = await asyncio.start_server(answer_as_another, "127.0.0.1", 0)
        meant = record(2, other.sockets[0].getsockname()[1])
        async with asker(meant) as deceived:
            answer = await deceived.ask(meant, wanted(1))
        other.close()
        assert isinstance(answer, PeerRequestFailed)
        assert "answers at its address" in answer.reason

    asyncio.run(scenario())
