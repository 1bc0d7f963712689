"""Nodes that restart, leave, hang, or say what makes no sense: the others lose nothing by it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec
import pytest
from aiohttp import web

from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.node_sharing import security_of
from cachefs_cluster.peers import tls
from cachefs_cluster.peers.tls import Certificates
from cachefs_cluster.sharing import endpoint, follower
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.sections import MOUNTED, MountedDataset
from cachefs_cluster.sharing.wire import CLUSTER, NODE, RESPONDER, SENDER, StateChanges, StateResponse
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.certificates import Authority
from tests.sharing import SharingNode, introduce, node_record, sharing_nodes
from tests.waiting import until_async

VALUE = MountedDataset("/mnt/data")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def impostor(answer: Answer, number: int = 99) -> AsyncIterator[NodeRecord]:
    """A node that answers to everything with *answer*."""
    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield node_record(number, runner.addresses[0][1])
    finally:
        await runner.cleanup()


def signed(body: bytes, number: int = 99) -> web.Response:
    return web.Response(body=body, headers={RESPONDER: f"{number:016x}"})


def said(record: NodeRecord, *changes: Any, full: bool = True, version: int = 5) -> web.Response:
    part = StateChanges(full, [(section, name, value) for section, name, value in changes], version)
    return signed(msgspec.msgpack.encode(StateResponse(record, part)))


def test_nodes_with_different_lists_tell_each_other() -> None:
    async def scenario() -> None:
        threads = Threads()
        nodes = [SharingNode(node_record(number), threads, list_epoch=epoch) for number, epoch in ((1, 7), (2, 8))]
        try:
            for node in nodes:
                await node.start()
            introduce(nodes)
            await until_async(lambda: all(node.shared.node_problems() for node in nodes))
            for node in nodes:
                [problem] = node.shared.node_problems().values()
                assert "make cluster.nodes the same" in problem
        finally:
            for node in nodes:
                await node.shared.stop()
            threads.close()

    virtual_time.run(scenario())


def test_a_node_that_starts_anew_has_said_nothing_yet() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second):
            first.shared.publish(MOUNTED, "data", VALUE)
            await until_async(lambda: second.shared.remote_values(MOUNTED))
            port = first.shared.endpoint.port
            await first.shared.stop()
            threads = Threads()
            again = SharingNode(node_record(1, incarnation=2), threads)
            try:
                await until_async(lambda: second.shared.node_problems())
                assert second.shared.remote_values(MOUNTED), "what it has said holds while it is away"
                await again.start(port)
                again.meet(second)
                again.shared.publish(MOUNTED, "other", VALUE)
                await until_async(
                    lambda: list(second.shared.remote_values(MOUNTED).get(again.record.id, ())) == ["other"]
                )
                await until_async(lambda: not second.shared.node_problems())
                assert second.membership.lost_ones
            finally:
                await again.shared.stop()
                threads.close()

    virtual_time.run(scenario())


def test_a_new_incarnation_in_the_view_has_said_nothing_yet() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second):
            heard: list[Any] = []
            second.shared.add_listener(MOUNTED, lambda *news: heard.append(news))
            first.shared.publish(MOUNTED, "data", VALUE)
            await until_async(lambda: heard)
            second.membership.tell(second.record, [node_record(1, port=1, incarnation=7)])
            await until_async(lambda: len(heard) == 2)
            assert heard[1] == (first.record.id, "data", None)

    virtual_time.run(scenario())


def test_what_a_node_has_said_goes_with_it() -> None:
    async def scenario() -> None:
        async with sharing_nodes(3) as (first, second, third):
            heard: list[Any] = []
            second.shared.add_listener(MOUNTED, lambda *news: heard.append(news))
            first.shared.publish(MOUNTED, "data", VALUE)
            third.shared.publish(MOUNTED, "data", VALUE)
            await until_async(lambda: len(heard) == 2)
            second.meet(third)
            await until_async(lambda: len(heard) == 3)
            assert heard[2] == (first.record.id, "data", None)
            assert list(second.shared.remote_values(MOUNTED)) == [third.record.id]
            assert second.shared.node_record(first.record.id) is None

    virtual_time.run(scenario())


def test_a_partitioned_node_learns_everything_when_it_is_back() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second):
            first.shared.publish(MOUNTED, "data", VALUE)
            await until_async(lambda: second.shared.remote_values(MOUNTED))
            # Nobody is at that port.
            second.membership.tell(second.record, [node_record(1, port=1)])
            await until_async(lambda: second.shared.node_problems())
            first.shared.remove(MOUNTED, "data")
            first.shared.publish(MOUNTED, "later", VALUE)
            second.meet(first)
            await until_async(lambda: list(second.shared.remote_values(MOUNTED).get(first.record.id, ())) == ["later"])

    virtual_time.run(scenario())


NONSENSE: dict[str, Callable[[NodeRecord], web.StreamResponse]] = {
    "no msgpack": lambda record: signed(b"\xc1garbage"),
    "nothing": lambda record: signed(b""),
    "another thing": lambda record: signed(msgspec.msgpack.encode({"record": 1})),
    "too much": lambda record: signed(b"x" * (49 << 20)),
    "an error": lambda record: web.Response(status=500, text="\x1b[2J", headers={RESPONDER: record.id}),
    "a redirect": lambda record: web.Response(status=302, headers={"Location": "/", RESPONDER: record.id}),
    "another node's answer": lambda record: signed(b"", 5),
    "another node's record": lambda record: said(node_record(5)),
    "nobody's record": lambda record: said(NodeRecord("x", "y", "\n", "h", 1, 1)),
    "the end of what it never began": lambda record: said(record, full=False, version=9),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_what_makes_no_sense_is_a_problem_of_that_node(what: str) -> None:
    async def scenario() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return NONSENSE[what](record)

        async with impostor(answer) as record, sharing_nodes(2) as (first, second):
            first.membership.tell(first.record, [record, second.record])
            await until_async(
                lambda: list(first.shared.node_problems()) == [record.id]
            )  # the other one is just beginning
            assert "\x1b" not in first.shared.node_problems()[record.id]
            assert "\n" not in first.shared.node_problems()[record.id]
            second.shared.publish(MOUNTED, "data", VALUE)
            await until_async(lambda: first.shared.remote_values(MOUNTED))
            assert list(first.shared.remote_values(MOUNTED)) == [second.record.id]

    virtual_time.run(scenario())


def test_a_node_that_answers_at_once_for_nothing_is_asked_ever_more_rarely() -> None:
    async def scenario() -> None:
        asked = 0

        async def answer(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return said(record)

        with patch.object(follower, "MAX_EMPTY_POLLS", 3):
            async with impostor(answer) as record, sharing_nodes(1) as (first,):
                first.membership.tell(first.record, [record])
                await until_async(lambda: first.shared.node_problems())
                assert "answers every poll at once" in first.shared.node_problems()[record.id]
                assert asked < 10

    virtual_time.run(scenario())


def test_a_node_that_hangs_holds_up_nobody() -> None:
    async def scenario() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(3600)
            return web.Response()

        async with impostor(answer) as record, sharing_nodes(2) as (first, second):
            with patch.object(follower, "SLACK_SECONDS", 0.2), patch("cachefs_cluster.sharing.wire.POLL_SECONDS", 0.2):
                first.membership.tell(first.record, [record, second.record])
                second.shared.publish(MOUNTED, "data", VALUE)
                await until_async(lambda: first.shared.remote_values(MOUNTED))
                await until_async(lambda: record.id in first.shared.node_problems())
            counters = await first.shared.node_counters(0.2)
            assert isinstance(counters[record.id], PeerFailed)

    virtual_time.run(scenario())


def test_only_members_of_this_cluster_are_answered() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second), aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{first.shared.endpoint.port}"

            async def ask(path: str, cluster: str, sender: str) -> int:
                async with session.get(url + path, headers={CLUSTER: cluster, SENDER: sender}) as answer:
                    return answer.status

            poll = "/state?of=-&since=0&progress=-1&wait=0"
            assert await ask(poll, "test", second.record.id) == 200
            assert await ask(poll, "test", "f" * 16) == 403
            assert await ask(poll, "other", second.record.id) == 403
            # A node that does not know its own place yet may ask who is here, if it is of this cluster.
            assert await ask("/node", "test", "f" * 16) == 200
            assert await ask("/node", "other", second.record.id) == 403
            for wrong in ("/state", "/state?of=-&since=x&progress=0&wait=0", "/state?of=-&since=0&progress=0&wait=x"):
                assert await ask(wrong, "test", second.record.id) == 400
            assert await ask("/blobs/" + "0" * 32, "test", second.record.id) == 404
            assert await ask("/blobs/..%2f..%2fetc", "test", second.record.id) == 404
            assert await ask("/nothing", "test", second.record.id) == 404

    virtual_time.run(scenario())


def test_a_node_has_one_poll_at_a_time() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second), aiohttp.ClientSession() as session:
            headers = {CLUSTER: "test", SENDER: second.record.id}
            second.meet()  # it does not ask by itself
            poll = f"http://127.0.0.1:{first.shared.endpoint.port}/state?of={first.record.incarnation}&progress=-1"

            async def ask() -> int:
                async with session.get(f"{poll}&since={version}&wait=60", headers=headers) as answer:
                    await answer.read()
                    return answer.status

            async with session.get(f"{poll}&since=0&wait=0", headers=headers) as answer:
                version = msgspec.msgpack.decode(await answer.read(), type=StateResponse).facts.version
            waiting = asyncio.create_task(ask())
            await until_async(lambda: session.connector and len(first.shared._polls) == 1)
            again = asyncio.create_task(ask())
            assert await asyncio.wait_for(waiting, 20) == 200, "the earlier one is answered"
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)

    virtual_time.run(scenario())


def test_who_holds_connections_keeps_no_member_out(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second), contextlib.AsyncExitStack() as stack:
            port = first.shared.endpoint.port

            async def connect(data: bytes) -> asyncio.StreamReader:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(data)
                return reader

            poll = f"GET /state?of=-&since=0&progress=-1&wait=0 HTTP/1.1\r\nHost: x\r\n{CLUSTER}: test\r\n{SENDER}: "
            request = f"{poll}{second.record.id}\r\n\r\n".encode()
            # More than there may be, of those that say nothing and those that never end: the first ones are closed,
            # and a member is answered.
            held = [await connect(b"" if number % 2 else b"GET /state HTTP/1.1\r\nX: ") for number in range(80)]
            answered = await connect(request)
            assert (await asyncio.wait_for(answered.readline(), 20)).endswith(b"200 OK\r\n")
            assert await asyncio.wait_for(held[0].read(), 20) == b""
            # Each member has so many, and what is too much is refused.
            with patch.object(
                first.shared.endpoint.limits, "bounds", dataclasses.replace(endpoint.CONNECTION_BOUNDS, of_member=3)
            ):
                lines = [await asyncio.wait_for((await connect(request)).readline(), 20) for _ in range(4)]
            assert lines[-1].split()[1] == b"503"
            # Without a traceback for each.
            for garbage in (b"\0" * 300, b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n"):
                assert (await asyncio.wait_for((await connect(garbage)).readline(), 20)).split()[1:2] in ([b"400"], [])
            assert not [record for record in caplog.records if record.exc_info]

    with patch.object(endpoint, "UNIDENTIFIED_SECONDS", 60.0):
        virtual_time.run(scenario())


def test_a_connection_that_does_not_say_who_it_is_is_closed() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", first.shared.endpoint.port)
            writer.write(b"GET /state HTTP/1.1\r\nX: ")
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
            # A member's stays: the poll of the other node, which has come before, and waits.
            await until_async(lambda: len(first.shared.endpoint.limits) == 1)

    with patch.object(endpoint, "UNIDENTIFIED_SECONDS", 0.3):
        virtual_time.run(scenario())


def test_with_certificates_only_members_are_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Authority(tmp_path / "good"), Authority(tmp_path / "bad")
    threads = Threads()

    def node(number: int, authority: Authority, name: str) -> SharingNode:
        security = security_of(Certificates(authority.issue(name)))
        return SharingNode(node_record(number), threads, security)

    async def scenario() -> None:
        members = [node(1, good, "node-1"), node(2, good, "node-2")]
        # Of nobody who is a member, of another authority, and one who says to be another node than the certificate.
        others = [node(3, good, "somebody"), node(2, bad, "node-2"), node(1, good, "node-2")]
        plain = SharingNode(node_record(2), threads)
        everybody = [*members, *others, plain]
        try:
            for each in everybody:
                await each.start()
            introduce(members)
            members[0].shared.publish(MOUNTED, "data", VALUE)
            await until_async(lambda: members[1].shared.remote_values(MOUNTED))
            for each in [*others, plain]:
                with pytest.raises(PeerFailed):
                    await each.shared.http.get(members[0].record, "/state?of=-&since=0&progress=-1&wait=0", 20, 1 << 20)
            # Nor does a member talk to somebody else at a member's address.
            moved = dataclasses.replace(members[0].record, control_port=others[0].record.control_port)
            members[1].membership.tell(members[1].record, [moved])
            await until_async(lambda: members[1].shared.node_problems())
            assert "certificate" in members[1].shared.node_problems()[members[0].record.id]
        finally:
            for each in everybody:
                await each.shared.stop()
            threads.close()

    virtual_time.run(scenario())
    refusals = [record.message for record in caplog.records if "is refused" in record.message]
    for why in ("not a member of the cluster", "certificate is that of node-2", "TLS failed"):
        assert any(why in line for line in refusals), (why, refusals)


def test_a_node_that_got_its_right_certificate_is_believed_without_a_restart(tmp_path: Path) -> None:
    """Connections on which the wrong one was seen are not used again."""
    authority, threads = Authority(tmp_path / "ca"), Threads()
    wrong, right = authority.issue("node-9"), authority.issue("node-1")

    async def scenario() -> None:
        one = SharingNode(node_record(1), threads, security_of(Certificates(wrong)))
        two = SharingNode(node_record(2), threads, security_of(Certificates(authority.issue("node-2"))))
        try:
            for each in (one, two):
                await each.start()
            one.meet(two)
            for _ in range(2):
                with pytest.raises(PeerFailed, match="certificate is that of"):
                    await two.shared.http.get(one.record, NODE, 20, 1 << 20)
            wrong.key.write_bytes(right.key.read_bytes())
            wrong.cert.write_bytes(right.cert.read_bytes())
            assert await two.shared.http.get(one.record, NODE, 20, 1 << 20)
        finally:
            for each in (one, two):
                await each.shared.stop()
            threads.close()

    with patch.object(tls, "CHECK_SECONDS", 0.0):
        virtual_time.run(scenario())
