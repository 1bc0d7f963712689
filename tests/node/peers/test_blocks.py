"""Blocks from node to node: a real peer server, a real client, and sockets between them."""

import asyncio
from pathlib import Path

import pytest

from cachefs.block import MEMORY
from cachefs_cluster.peers import peer as peer_module
from cachefs_cluster.peers.peer_requests import BlockNotFound, PeerBlock
from tests.blockstore import data_of
from tests.peering import ServingNode, asker, wanted
from tests.waiting import until_async


def test_blocks_that_are_there_come_and_others_do_not(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(*range(10))
            answers = await asyncio.gather(*(one.begin(node.record, wanted(number)) for number in range(12)))
            for number, answer in enumerate(answers[:10]):
                assert isinstance(answer, PeerBlock), answer
                assert bytes(answer.data) == data_of(number)
                assert answer.tier == MEMORY
            assert all(isinstance(answer, BlockNotFound) for answer in answers[10:])
            counters = one.client.counters[node.record.id]
            assert (counters.blocks, counters.bytes, counters.not_here) == (10, 1_000_000, 2)
            assert one.client.in_flight == (0, 0)

    asyncio.run(run())


def test_blocks_asked_for_one_by_one_do_not_say_how_fast_the_link_is(root: Path) -> None:
    """They come as often as they are asked for. A client that took that for the link's rate gave up its peers: each
    block then seemed to take seconds."""

    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(*range(4))
            first = one.client._in_flight.unmeasured.window.rate
            for number in range(4):
                assert isinstance(await one.ask(node.record, wanted(number)), PeerBlock)
                await asyncio.sleep(0.03)  # longer than rates are measured over
                assert {card.window.rate for card in one.client._in_flight.cards.values()} == {first}

    asyncio.run(run())


def test_a_peer_that_seemed_slow_while_this_node_stood_still_is_asked_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "_HALF_LIFE", 0.05)

    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            peer = one.client._peers[node.record.id]
            for _ in range(50):  # answers that took minutes, and came byte by byte
                peer.record_response(600.0, 1, 60.0, asyncio.get_running_loop().time())
            assert 0.5 < peer.latency <= 1.0
            assert one.client.expected_seconds(node.record, 100_000) > 1
            await until_async(lambda: one.client.expected_seconds(node.record, 100_000) < 0.01, "it is asked again")

    asyncio.run(run())
