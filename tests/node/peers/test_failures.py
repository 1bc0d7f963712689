"""Peers that are dead, stopped, slow, broken, or somebody else: who asks learns it in time, and nobody else suffers."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from cachefs import errors
from cachefs.block import BlockLocation, piece_checksums
from cachefs.messages import FetchedBlock
from cachefs.segment import segment_path
from cachefs_bench.lab.ports import free_port
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers import client as client_module
from cachefs_cluster.peers import protocol
from cachefs_cluster.peers.peer_requests import (
    BlockNotFound,
    FailureKind,
    FetchYourself,
    PeerBlock,
    PeerOverloaded,
    PeerRequestFailed,
    RequestOptions,
    SnapshotNotFound,
)
from cachefs_cluster.peers.server_process import PeerServers
from cachefs_daemon.fetch.block_fetch import BypassBlock
from tests.blockstore import data_of, key_of
from tests.peering import DEADLINE, ME, ServingNode, asker, node_id, record, view_of, wanted
from tests.waiting import until_async

Write = Callable[[bytes], None]


@asynccontextmanager
async def scripted(*answers: bytes, number: int = 1, close: bool = True) -> AsyncIterator[NodeRecord]:
    """A peer that answers each question with the next of these bytes, the last one again and again."""
    left = list(answers)
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"content-length: " in head.lower():
                    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(left.pop(0) if len(left) > 1 else left[0])
                await writer.drain()
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        if close:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield record(number, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in writers:
            writer.close()


def _answer(*chunks: bytes, sender: str = node_id(1)) -> bytes:
    return protocol.response_head(sender, "f" * 16, 7) + b"".join(chunks) + protocol.last_chunk(0)


def _block(at: int, number: int, data: bytes | None = None) -> bytes:
    data = data_of(number) if data is None else data
    checksums = piece_checksums(key_of(number), data_of(number))
    return protocol.block_start(at, 0, len(data), checksums) + data + protocol.block_end(stayed=True)


def test_dead_peer_costs_one_failure_and_is_asked_again_once_a_probe_gets_through(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node:
            node.put(1)
            dead = dataclasses.replace(node.record, data_port=free_port())
            async with asker(dead) as one:
                first = await one.ask(dead, wanted(1))
                assert isinstance(first, PeerRequestFailed)
                assert first.kind == FailureKind.UNREACHABLE
                assert not one.client.is_usable(dead.id)
                assert one.membership.lost_nodes[0] == dead.id
                second = await one.ask(dead, wanted(1))
                assert isinstance(second, PeerRequestFailed)
                assert second.reason.startswith("node node-1 at 127.0.0.1:")
                assert "cannot be reached" in one.complaints()
                # It comes up at the address that the client knows: only the probes find that out.
                [rail] = one.client._peers[dead.id].rails
                rail.record = node.record
                await until_async(lambda: one.client.is_usable(dead.id), "a probe gets through")
                assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)

    asyncio.run(run())


def test_stopped_server_is_noticed_by_its_silence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel goes on to take connections and questions for it."""
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 1.0)

    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1, 2)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            [pid] = node.servers.pids
            os.kill(pid, signal.SIGSTOP)
            try:
                await until_async(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it stops")
                answer = await one.ask(node.record, wanted(2))
                assert isinstance(answer, PeerRequestFailed)
                assert answer.kind == FailureKind.UNREACHABLE
                assert "has sent nothing for" in answer.reason
                assert not one.client.is_usable(node.record.id)
                assert one.client.in_flight == (0, 0)
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_async(lambda: one.client.is_usable(node.record.id), "a probe gets through")
            assert isinstance(await one.ask(node.record, wanted(2)), PeerBlock)

    asyncio.run(run())


def test_killed_server_is_started_again(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1, 2)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            [pid] = node.servers.pids
            os.kill(pid, signal.SIGKILL)
            await until_async(lambda: node.servers.pids not in ([], [pid]), "another server runs")
            assert "is started again" in node.complaints()

            async def comes() -> bool:
                return isinstance(await one.ask(node.record, wanted(2)), PeerBlock)

            while not await comes():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 3 * DEADLINE))


def test_answer_that_breaks_off_fails_what_has_not_come() -> None:
    async def run() -> None:
        whole = _answer(_block(0, 1), _block(1, 2))
        async with scripted(whole[: len(whole) - 60_000]) as peer, asker(peer) as one:
            first, second = one.begin(peer, wanted(1)), one.begin(peer, wanted(2))
            got = await first
            assert isinstance(got, PeerBlock)
            assert bytes(got.data) == data_of(1)
            broken = await second
            assert isinstance(broken, PeerRequestFailed)
            assert "closed the connection" in broken.reason
            assert one.client.in_flight == (0, 0)
            assert not one.client.is_usable(peer.id)

    asyncio.run(run())


def test_what_is_no_answer_ends_the_connection_and_is_told() -> None:
    async def run() -> None:
        nonsense = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
        async with scripted(nonsense) as peer, asker(peer) as one:
            answer = await one.ask(peer, wanted(1))
            assert isinstance(answer, PeerRequestFailed)
            assert "sent an invalid response" in one.complaints()

    asyncio.run(run())


def test_wrong_bytes_twice_and_the_peer_is_not_asked_for_that_block() -> None:
    async def run() -> None:
        wrong = _answer(_block(0, 1, b"x" * 100_000))
        async with scripted(wrong, wrong, _answer(_block(0, 2)), close=False) as peer, asker(peer) as one:
            answer = await one.ask(peer, wanted(1))
            assert isinstance(answer, PeerRequestFailed)
            assert answer.kind == FailureKind.WRONG_BYTES
            assert one.client.counters[peer.id].wrong == 2
            again = await one.ask(peer, wanted(1))
            assert isinstance(again, PeerRequestFailed)
            assert again.kind == FailureKind.WRONG_BYTES
            assert one.client.is_usable(peer.id)
            assert isinstance(await one.ask(peer, wanted(2)), PeerBlock)

    asyncio.run(run())


def test_damaged_copy_is_noticed_and_its_daemon_told(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            location = node.store.get(key_of(1))
            assert location is not None
            with segment_path(root / "memory", location.segment).open("r+b") as segment:
                segment.seek(location.offset + 500)
                segment.write(b"damage")
            node.bring = lambda _: FetchedBlock(location=b"", is_missing=True)
            assert isinstance(await one.ask(node.record, wanted(1)), BlockNotFound)
            [asked] = node.asked
            assert BlockLocation.unpack(asked.blocks[0].failed_location) == location
            assert asked.peer == ME
            assert one.client.counters[node.record.id].wrong == 1

    asyncio.run(run())


def test_block_that_was_evicted_while_it_was_sent_is_not_there() -> None:
    async def run() -> None:
        evicted = _block(0, 1, b"\0" * 100_000)[:-3] + protocol.MOVED + b"\r\n"
        async with scripted(_answer(evicted)) as peer, asker(peer) as one:
            assert isinstance(await one.ask(peer, wanted(1)), BlockNotFound)
            assert one.client.counters[peer.id].wrong == 0

    asyncio.run(run())


def test_block_that_moved_to_another_tier_while_it_was_sent_is_asked_for_again() -> None:
    """Otherwise its origin would be asked, though it is on that node."""

    async def run() -> None:
        moved = _block(0, 1, b"\0" * 100_000)[:-3] + protocol.MOVED + b"\r\n"
        async with scripted(_answer(moved), _answer(_block(0, 1))) as peer, asker(peer) as one:
            assert isinstance(await one.ask(peer, wanted(1)), PeerBlock)
            assert one.client.counters[peer.id].wrong == 0
            assert one.client.in_flight == (0, 0)

    asyncio.run(run())


def test_old_epoch_is_told_and_refreshed(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record, epoch=6) as one:
            node.put(1)
            answer = await one.ask(node.record, wanted(1))
            assert isinstance(answer, PeerRequestFailed)
            assert (answer.kind, answer.epoch) == (FailureKind.OTHER_EPOCH, 7)
            assert one.membership.refreshed == 1
            assert one.client.is_usable(node.record.id)
            one.membership.view = dataclasses.replace(one.membership.view, epoch=7)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            # And one that is newer than the server's is served, and the server's daemon looks for it.
            one.membership.view = dataclasses.replace(one.membership.view, epoch=8)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            await until_async(lambda: node.membership.refreshed, "the server's daemon refreshes")

    asyncio.run(run())


def test_recycled_address_is_noticed(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            other = dataclasses.replace(node.record, id=node_id(9), name="node-9")
            answer = await one.ask(other, wanted(1))
            assert isinstance(answer, PeerRequestFailed)
            assert answer.kind == FailureKind.WRONG_NODE
            assert "belongs to node-1" in answer.reason
            assert not one.client.is_usable(other.id)
            earlier = dataclasses.replace(node.record, incarnation="e" * 16)
            answer = await one.ask(earlier, wanted(1))
            assert isinstance(answer, PeerRequestFailed)
            assert "has started again" in answer.reason
            assert one.membership.heard_of[node.record.id] == node.record.incarnation
            assert one.client.is_usable(node.record.id)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)

    asyncio.run(run())


def test_node_that_is_no_member_is_refused_with_a_line(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            node.membership.set(view_of(node.record.id, [node.record]))
            await asyncio.sleep(0)

            async def refused() -> bool:
                return isinstance(await one.ask(node.record, wanted(1)), PeerRequestFailed)

            while not await refused():  # noqa: ASYNC110  # the server learns it over its pipe
                await asyncio.sleep(0.01)
            await until_async(lambda: f"knows no member {ME}" in node.complaints(), "a line")

    asyncio.run(asyncio.wait_for(run(), 3 * DEADLINE))


def test_fetch_brings_what_is_not_there_and_beats_while_it_takes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 1.6)

    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1, 2)
            place = node.store.get(key_of(2))
            assert place is not None
            node.store.claim([key_of(2)], "")
            outcomes = {
                10: BypassBlock.of(key_of(10), data_of(10)),
                11: FetchedBlock(location=b"", must_fetch_itself=True),
                12: FetchedBlock(location=b"", is_missing=True),
                13: errors.Busy("too many"),
                14: errors.OriginUnavailable("the origin is on fire"),
                15: FetchedBlock(location=b"", lacks_snapshot=True),
            }
            node.bring = lambda fetch: outcomes[fetch.blocks[0].entry]
            node.delay = 2.5
            asks = [one.begin(node.record, wanted(number), fetch=True) for number in (1, 10, 11, 12, 13, 14)]
            asks.append(one.begin(node.record, wanted(15), fetch=True, await_snapshot=False))
            here, passing, take, none, busy, failed, lacks = await asyncio.gather(*asks)
            assert isinstance(here, PeerBlock)
            assert isinstance(passing, PeerBlock)
            assert bytes(passing.data) == data_of(10)
            assert passing.tier is None
            assert isinstance(take, FetchYourself)
            assert isinstance(none, BlockNotFound)
            assert isinstance(busy, PeerOverloaded)
            assert isinstance(failed, PeerRequestFailed)
            assert failed.reason == "node node-1: the origin is on fire"
            assert isinstance(lacks, SnapshotNotFound)
            waiting = {fetch.blocks[0].entry: fetch.await_snapshot for fetch in node.asked}
            assert waiting == {**dict.fromkeys(range(10, 15), True), 15: False}
            assert {fetch.peer for fetch in node.asked} == {ME}

    asyncio.run(run())


def test_a_node_that_brings_a_block_gives_signs_while_its_daemon_lives(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            node.bring = lambda _: None  # its origin takes for ever
            name, now = node.record.id, asyncio.get_running_loop().time
            began = now()
            asks = [one.begin(node.record, wanted(number), fetch=True) for number in (10, 11)]
            await until_async(
                lambda: one.client.last_heartbeat(name, fetch=True) > began + 0.3, "signs come again and again"
            )
            heard = PeerServers._handle_report
            monkeypatch.setattr(
                PeerServers, "_handle_report", lambda *_: None
            )  # the daemon hangs, and its server does not
            await until_async(lambda: now() - one.client.last_heartbeat(name, fetch=True) > 0.6, "no more signs come")
            last = one.client.last_heartbeat(name, fetch=True)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)  # what it has it gives
            doubted = now()
            one.client.probe_silent(name)
            await until_async(
                lambda: one.client.last_heartbeat(name, fetch=False) > doubted, "its server answers the probe"
            )
            assert one.client.last_heartbeat(name, fetch=True) == last
            assert one.client.is_usable(name)
            monkeypatch.setattr(PeerServers, "_handle_report", heard)
            one.client.probe_silent(name)
            await until_async(lambda: one.client.last_heartbeat(name, fetch=True) > last, "signs come again")
            for ask in asks:
                ask.cancel()

    asyncio.run(run())


def test_a_node_of_which_no_sign_comes_counts_as_dead_without_any_question(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1, 2)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            [pid] = node.servers.pids
            os.kill(pid, signal.SIGSTOP)
            try:
                one.client.probe_silent(node.record.id)
                await until_async(lambda: not one.client.is_usable(node.record.id), "the probe comes to nothing")
                dead = asyncio.get_running_loop().time()
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_async(lambda: one.client.is_usable(node.record.id), "a probe gets through")
            assert one.client.last_heartbeat(node.record.id, fetch=True) > dead, "or readers pass it over for a minute"
            assert isinstance(await one.ask(node.record, wanted(2)), PeerBlock)

    asyncio.run(run())


def test_deadline_and_cancellation_let_go_of_everything(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.bring = lambda _: None
            late = one.begin(node.record, wanted(1), fetch=True, seconds=0.3)
            answer = await asyncio.wait_for(late, DEADLINE)
            assert isinstance(answer, PeerRequestFailed)
            assert answer.kind == FailureKind.LATE
            loop = asyncio.get_running_loop()
            told: list[object] = []
            how = client_module.RequestOptions(loop.time() + DEADLINE, may_fetch=True)
            ask = one.client.request_block(node.record, wanted(2), how, told.append)
            await until_async(lambda: len(node.asked) == 2, "the daemon is asked")
            ask.cancel()
            ask.cancel()
            await until_async(lambda: one.client.in_flight == (0, 0), "nothing is on the way")
            assert not told
            assert one.client.is_usable(node.record.id)

    asyncio.run(run())


def test_connection_that_the_server_has_closed_is_no_failure() -> None:
    async def run() -> None:
        async with scripted(_answer(_block(0, 1))) as peer, asker(peer) as one:
            for _ in range(20):
                assert isinstance(await one.ask(peer, wanted(1)), PeerBlock)
            assert one.client.counters[peer.id].failures == 0

    asyncio.run(run())


def test_peers_that_are_closed_answer_everything() -> None:
    async def run() -> None:
        async with scripted(b"") as peer:
            async with asker(peer) as one:
                waiting = [one.begin(peer, wanted(number)) for number in range(600)]
            answers = await asyncio.gather(*waiting)
            assert all(isinstance(answer, PeerRequestFailed) for answer in answers)

    asyncio.run(run())


def test_an_error_of_whoever_is_told_of_a_block_keeps_no_other_from_coming(root: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a bug")

    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(*range(1, 9))
            how = RequestOptions(asyncio.get_running_loop().time() + DEADLINE)
            for number in range(1, 5):
                one.client.request_block(node.record, wanted(number), how, fail)
            answers = [await one.ask(node.record, wanted(number), seconds=DEADLINE) for number in range(5, 9)]
            assert all(isinstance(answer, PeerBlock) for answer in answers)

    asyncio.run(run())


def test_nodes_that_have_left_are_forgotten(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            assert isinstance(await one.ask(node.record, wanted(1)), PeerBlock)
            await until_async(
                lambda: not any(peer.batches for peer in one.client._peers.values()), "the answer has ended"
            )
            one.membership.set(view_of(ME, [record(int(ME, 16), 1)], 8))
            assert one.client._peers == {}

    asyncio.run(run())


def test_a_server_that_reads_slowly_is_told_the_last_view_only(root: Path) -> None:
    async def run() -> None:
        async with ServingNode(root) as node, asker(node.record) as one:
            node.put(1)
            known = node.membership.view.members
            many = [record(number, 9, name="n" * 60) for number in range(100, 2100)]
            [pid] = node.servers.pids
            os.kill(pid, signal.SIGSTOP)
            for epoch in range(8, 40):
                node.membership.set(view_of(node.record.id, [*known, *many], epoch))
            assert sum(len(server.unsent) for server in node.servers._servers if server is not None) < 2 << 20
            node.membership.set(view_of(node.record.id, known, 50))
            os.kill(pid, signal.SIGCONT)
            one.membership.set(view_of(ME, known, 50))
            for _ in range(200):
                answer = await one.ask(node.record, wanted(1))
                if isinstance(answer, PeerBlock):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"the server knows no view that is new: {answer}")

    asyncio.run(run())
