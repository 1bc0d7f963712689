"""Peers with several addresses: blocks come over all of them, and over the others where one is dead, silent or another
node's."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from cachefs_bench.lab.ports import free_port
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers import client as client_module
from cachefs_cluster.peers import connecting
from cachefs_cluster.peers.peer import MAX_CONNECTIONS
from cachefs_cluster.peers.peer_requests import PeerBlock, PeerRequestFailed, PeerResponse
from cachefs_cluster.peers.rail import Rail
from tests.certificates import Authority
from tests.peering import DEADLINE, Asker, ServingNode, asker, node_id, wanted
from tests.waiting import until_async

BLOCKS = range(60)


class Link:
    """Passes on to a node what arrives at another address, until it is cut."""

    def __init__(self, host: str, node: NodeRecord) -> None:
        self._address, self._node = (host, node.data_port), node
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, *self._address, reuse_address=True)

    def cut(self) -> None:
        self._open.clear()

    def restore(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._node.host, self._node.data_port)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._open.wait()
                self.bytes += len(data)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def link(host: str, node: NodeRecord) -> AsyncIterator[Link]:
    one = Link(host, node)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


def rails(one: Asker, node: NodeRecord) -> Sequence[Rail]:
    return one.client.rails_of(node.id)


async def ask_all(one: Asker, node: NodeRecord, numbers: Sequence[int] = BLOCKS) -> list[PeerResponse]:
    return list(await asyncio.gather(*(one.begin(node, wanted(number)) for number in numbers)))


def are_blocks(answers: Sequence[PeerResponse]) -> bool:
    return all(isinstance(answer, PeerBlock) for answer in answers)


async def use_all_rails(one: Asker, node: NodeRecord) -> None:
    """Ask for blocks until some have come over each rail."""
    is_first = True
    while is_first or not all(rail.received_bytes for rail in rails(one, node)):
        assert are_blocks(await ask_all(one, node))
        is_first = False


def test_blocks_come_over_all_rails_and_connections_do_not_multiply(root: Path) -> None:
    async def run() -> None:
        hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        async with ServingNode(root, hosts=hosts) as node, asker(node.record, window=600_000) as one:
            node.put(*BLOCKS)
            for _ in range(5):
                assert are_blocks(await ask_all(one, node.record))
                [peer] = one.client._peers.values()
                assert peer.connection_count <= sum(MAX_CONNECTIONS)
                assert len(peer.batches) <= MAX_CONNECTIONS[0]
            assert [rail.record.host for rail in peer.rails] == list(hosts)
            assert all(rail.received_bytes for rail in peer.rails)
            assert {rail.card for rail in peer.rails} == {"lo"}
            assert one.client.received_by_card() == {"lo": sum(rail.received_bytes for rail in peer.rails)}
            assert one.client.received_by_card() == {"lo": 5 * len(BLOCKS) * 100_000}
            assert one.client.in_flight == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("dead_at", [0, 1])
def test_a_rail_that_is_dead_from_the_start_costs_no_block_and_is_used_once_it_answers(
    root: Path, dead_at: int
) -> None:
    async def run() -> None:
        async with ServingNode(root) as node:
            node.put(*BLOCKS)
            there = [node.record.host]
            there.insert(dead_at, "127.0.0.9")
            record = dataclasses.replace(node.record, host=there[0], rails=(there[1],))
            async with asker(record) as one:
                assert are_blocks(await ask_all(one, record))
                assert one.client.is_usable(record.id)
                assert one.client.counters[record.id].failures == 0
                assert not one.membership.lost_nodes
                rail = rails(one, record)[dead_at]
                await until_async(lambda: rail.health.is_out_of_use, "the dead rail is noticed")
                assert f"node node-1 at 127.0.0.9:{record.data_port} cannot be reached" in rail.health.reason
                assert "Connection refused; its other addresses are used until it answers" in one.complaints()
                assert one.client.rails_down == 1
                async with link("127.0.0.9", node.record):
                    await until_async(lambda: not rail.health.is_out_of_use, "a probe gets through")
                    while not rail.received_bytes:
                        assert are_blocks(await ask_all(one, record))
                    assert one.client.rails_down == 0

    asyncio.run(run())


@pytest.mark.parametrize("dead_at", [0, 1])
def test_no_block_waits_for_a_rail_that_drops_all_packets(
    root: Path, dead_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 10 * DEADLINE)

    async def run() -> None:
        async with ServingNode(root) as node:
            node.put(*BLOCKS)
            hosts = [node.record.host]
            hosts.insert(dead_at, "127.0.0.9")
            record = dataclasses.replace(node.record, host=hosts[0], rails=(hosts[1],))
            with swallowing("127.0.0.9", record.data_port):
                async with asker(record, window=600_000) as one:
                    for _ in range(3):
                        assert are_blocks(await ask_all(one, record))
                    rail = rails(one, record)[dead_at]
                    assert rail.connecting_count, "it is still tried"
                    assert not rail.received_bytes

    asyncio.run(run())


@contextmanager
def swallowing(host: str, port: int) -> Iterator[None]:
    """An address at which the kernel drops what wants to connect: no program accepts, and its queue is full."""
    with socket.create_server((host, port), backlog=0), ExitStack() as stack:
        while True:
            one = stack.enter_context(socket.socket())
            one.settimeout(0.2)
            try:
                one.connect((host, port))
            except TimeoutError:
                break
        yield


@asynccontextmanager
async def asker_over_two_rails(root: Path) -> AsyncIterator[tuple[Asker, NodeRecord, Link]]:
    """A node with blocks that is asked over two rails, both in use, and the second of them."""
    async with ServingNode(root) as node, link("127.0.0.2", node.record) as second:
        node.put(*BLOCKS)
        record = dataclasses.replace(node.record, rails=("127.0.0.2",))
        async with asker(record, window=600_000) as one:
            await use_all_rails(one, record)
            yield one, record, second


def test_what_was_asked_over_a_rail_that_falls_silent_comes_over_the_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 1.0)

    async def run() -> None:
        async with asker_over_two_rails(root) as (one, record, second):
            second.cut()
            for _ in range(3):
                assert are_blocks(await ask_all(one, record))
            rail = rails(one, record)[1]
            assert rail.health.is_out_of_use
            assert one.client.is_usable(record.id)
            assert one.client.counters[record.id].failures == 0
            assert not one.membership.lost_nodes
            assert one.client.in_flight == (0, 0)
            second.restore()
            await until_async(lambda: not rail.health.is_out_of_use, "a probe gets through")
            before = rail.received_bytes
            while rail.received_bytes == before:
                assert are_blocks(await ask_all(one, record))

    asyncio.run(run())


def test_a_silent_rail_is_left_at_once_where_another_answers_a_probe(root: Path) -> None:
    """A reader that waits has the peer probed after 0.3 s. Without that the blocks would come after SILENT_SECONDS."""

    async def run() -> None:
        async with asker_over_two_rails(root) as (one, record, second):
            second.cut()
            asks = asyncio.ensure_future(ask_all(one, record))
            [peer] = one.client._peers.values()
            await until_async(lambda: any(batch.rail is peer.rails[1] for batch in peer.batches.values()))
            await asyncio.sleep(0.3)
            one.client.probe_silent(record.id)
            await until_async(lambda: peer.rails[1].health.is_out_of_use, "its probe comes to nothing")
            assert f"node node-1 at 127.0.0.2:{record.data_port} does not answer; its other" in one.complaints()
            assert are_blocks(await asks)
            assert one.client.counters[record.id].failures == 0
            assert not peer.is_out_of_use

    asyncio.run(run())


def test_a_peer_none_of_whose_rails_answers_is_out_of_use_until_one_does(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node:
            node.put(1)
            dead = dataclasses.replace(node.record, host="127.0.0.8", rails=("127.0.0.9",))
            async with asker(dead) as one:
                answer = await one.ask(dead, wanted(1))
                assert isinstance(answer, PeerRequestFailed)
                assert not one.client.is_usable(dead.id)
                reason = one.client.silence_reason(dead.id)
                assert "127.0.0.8" in reason
                assert "127.0.0.9" in reason
                assert one.membership.lost_nodes
                assert one.client.rails_down == 0, "the node is away, and not some of its rails"
                async with link("127.0.0.9", node.record):
                    await until_async(lambda: one.client.is_usable(dead.id), "one of them answers")
                    assert isinstance(await one.ask(dead, wanted(1)), PeerBlock)
                    assert one.client.rails_down == 1

    asyncio.run(run())


def test_another_node_at_a_rail_serves_nothing_and_costs_no_block(root: Path) -> None:
    async def run() -> None:
        port = free_port()
        async with (
            ServingNode(root / "a", hosts=["127.0.0.1"], port=port) as node,
            ServingNode(root / "b", 2, hosts=["127.0.0.2"], port=port) as other,
        ):
            node.put(*BLOCKS)
            other.put(*BLOCKS)
            record = dataclasses.replace(node.record, rails=("127.0.0.2",))
            async with asker(record, other.record) as one:
                for _ in range(3):
                    assert are_blocks(await ask_all(one, record))
                rail = rails(one, record)[1]
                await until_async(lambda: rail.health.is_out_of_use, "the other node is noticed")
                assert rail.received_bytes == 0
                assert f"belongs to node-2 ({node_id(2)}) now" in one.complaints() or node_id(2) in rail.health.reason
                assert one.client.counters[record.id].failures == 0

    asyncio.run(run())


def test_the_certificate_of_another_node_at_a_rail_is_refused(root: Path, tmp_path: Path) -> None:
    async def run() -> None:
        authority = Authority(tmp_path / "authority")
        port, first, second = free_port(), authority.issue("node-1"), authority.issue("node-2")
        async with (
            ServingNode(root / "a", hosts=["127.0.0.1"], port=port, tls=first) as node,
            ServingNode(root / "b", 2, hosts=["127.0.0.2"], port=port, tls=second),
        ):
            node.put(*BLOCKS)
            record = dataclasses.replace(node.record, rails=("127.0.0.2",))
            async with asker(record, tls=authority.issue("asker")) as one:
                assert are_blocks(await ask_all(one, record))
                rail = rails(one, record)[1]
                await until_async(lambda: rail.health.is_out_of_use, "the certificate is refused")
                assert f"the certificate at 127.0.0.2:{port} names node-2, and not node-1" in rail.health.reason
                assert rail.received_bytes == 0

    asyncio.run(run())


def test_with_a_secret_only_the_first_address_is_asked(root: Path) -> None:
    """Another user could listen at a further address of loopback, and pass the proof on."""

    async def run() -> None:
        secret = ClusterSecret(b"s" * 32)
        async with ServingNode(root, secret=secret) as node, link("127.0.0.2", node.record) as planted:
            node.put(*BLOCKS)
            record = dataclasses.replace(node.record, rails=("127.0.0.2",))
            async with asker(record, secret=secret) as one:
                assert are_blocks(await ask_all(one, record))
                assert len(rails(one, record)) == 1
                assert planted.bytes == 0

    asyncio.run(run())


def test_rails_that_a_node_gives_up_are_closed_and_new_ones_are_used(root: Path) -> None:
    async def run() -> None:
        hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        async with ServingNode(root, hosts=hosts) as node:
            node.put(*BLOCKS)
            before = dataclasses.replace(node.record, rails=hosts[1:2])
            async with asker(before, window=600_000) as one:
                await use_all_rails(one, before)
                kept, gone = rails(one, before)
                after = dataclasses.replace(node.record, rails=hosts[2:])
                received = gone.received_bytes
                await use_all_rails(one, after)
                assert rails(one, after)[0] is kept
                assert [rail.record.host for rail in rails(one, after)] == ["127.0.0.1", "127.0.0.3"]
                assert gone.received_bytes == received
                await until_async(lambda: not gone.idle_connections, "its connections are closed")

    asyncio.run(run())


def test_an_address_that_no_card_has_yet_is_bound_for_later(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root, hosts=("127.0.0.1", "203.0.113.7")) as node, asker(node.record) as one:
            node.put(1)
            assert "203.0.113.7" in node.complaints()
            assert "no network card of this machine has the address" in node.complaints()
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)

    asyncio.run(run())
