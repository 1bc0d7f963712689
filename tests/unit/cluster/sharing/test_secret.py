"""Control endpoints on loopback: who does not know the secret is refused, and is not believed."""

import asyncio
import dataclasses
from itertools import repeat

import aiohttp
import pytest

from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.security import ConnectionSecurity
from cachefs_cluster.sharing.wire import CLUSTER, NODE, SENDER
from tests import virtual_time
from tests.sharing import sharing_nodes
from tests.waiting import until_async

KEY = ClusterSecret(b"0123456789abcdef")
OTHER = ClusterSecret(b"another-secret-of-it")
ALIKE = repeat(ConnectionSecurity(secret=KEY))


def test_nodes_with_one_secret_hear_each_other_also_after_another_start() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2, ALIKE) as (one, two):
            await until_async(
                lambda: one.shared.has_responded(two.record.id) and two.shared.has_responded(one.record.id)
            )
            # The other node runs with another incarnation than this one knows, or this one knows none (a static list).
            for known in ("", "e" * 16):
                two.record = dataclasses.replace(two.record, incarnation="d" * 16)
                two.meet(one)
                asked = dataclasses.replace(two.record, incarnation=known)
                assert b"node-2" in await one.shared.http.get(asked, NODE, 10, 1 << 16)

    virtual_time.run(scenario())


@pytest.mark.parametrize("keys", [(KEY, OTHER), (KEY, None), (None, KEY)])
def test_a_node_with_another_secret_is_refused_and_not_believed(keys: tuple[ClusterSecret | None, ...]) -> None:
    async def scenario() -> None:
        async with sharing_nodes(2, [ConnectionSecurity(secret=key) for key in keys]) as nodes:
            for asks, asked in (nodes, nodes[::-1]):
                with pytest.raises(PeerFailed, match=r"cluster\.secret_file"):
                    await asks.shared.http.post(asked.record, "/state", 10, 1 << 16, b"")

    virtual_time.run(scenario())


def test_a_user_who_says_that_he_is_a_member_is_refused_and_what_was_asked_of_him_opens_nothing() -> None:
    caught: list[dict[str, str]] = []

    async def steal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen on the port of a node that is down, and answer as that node."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        caught.append(dict(line.split(": ", 1) for line in lines))
        writer.write(b"HTTP/1.1 200 OK\r\nCachefs-Answered-By: 0000000000000002\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with sharing_nodes(2, ALIKE) as (one, two):
            url = f"http://127.0.0.1:{one.record.control_port}/state?since=0&progress=0&wait=0"
            async with aiohttp.ClientSession() as session:
                plain = {CLUSTER: "test", SENDER: two.record.id}
                async with session.get(url, headers=plain) as answer:
                    assert answer.status == 403
                thief = await asyncio.start_server(steal, "127.0.0.1", 0)
                down = dataclasses.replace(two.record, control_port=thief.sockets[0].getsockname()[1])
                with pytest.raises(PeerFailed, match="does not prove"):
                    await one.shared.http.get(down, "/state", 10, 1 << 16)
                thief.close()
                for name in ("Host", "Accept", "Accept-Encoding"):
                    caught[0].pop(name, None)
                # Used against the node that has asked, and against the other one, which has begun again since.
                for node in (one, two):
                    if node is two:
                        two.record = dataclasses.replace(two.record, incarnation="d" * 16)
                        two.meet(one)
                    url = f"http://127.0.0.1:{node.record.control_port}/state?since=0&progress=0&wait=0"
                    async with session.get(url, headers=caught[0]) as answer:
                        assert answer.status in (403, 421)

    virtual_time.run(scenario())


@pytest.mark.parametrize("path", [NODE, "/observe/nodes"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_a_live_node_says_to_another_user_makes_no_answer_of_a_node_that_is_down(
    path: str, is_restarted: bool
) -> None:
    async def scenario() -> None:
        async with sharing_nodes(3, ALIKE) as (one, two, three):
            live = two if is_restarted else three
            live.record = dataclasses.replace(live.record, incarnation="d" * 16)
            live.meet(one)

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                """Listen on the port of node 2, which is down, and answer with what a live node says to the nonce."""
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
                headers = dict(line.split(": ", 1) for line in lines)
                headers["Cachefs-Addressee"] = live.record.incarnation
                if path != NODE:
                    headers["Cachefs-Observer"] = "scheduler"
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"http://127.0.0.1:{live.record.control_port}{path}", headers=headers) as answer,
                ):
                    said = {name: value for name, value in answer.headers.items() if name.startswith("Cachefs-")}
                said["Cachefs-Answered-By"] = two.record.id
                lines = [f"{name}: {value}" for name, value in said.items()]
                writer.write("\r\n".join(["HTTP/1.1 200 OK", *lines, "Content-Length: 2", "", "ok"]).encode())
                await writer.drain()
                writer.close()

            thief = await asyncio.start_server(relay, "127.0.0.1", 0)
            down = dataclasses.replace(two.record, control_port=thief.sockets[0].getsockname()[1])
            for known in (down, dataclasses.replace(down, incarnation=live.record.incarnation)):
                with pytest.raises(PeerFailed, match="does not prove"):
                    await one.shared.http.get(known, path, 10, 1 << 16)
            thief.close()

    virtual_time.run(scenario())


def test_a_nonce_that_is_none_is_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with sharing_nodes(2, ALIKE) as (one, _):
            for line in (
                b"Cachefs-Nonce: \xff",
                b"Cachefs-Nonce: 12",
                b"Cachefs-Node: \xff\r\nCachefs-Nonce: " + b"0" * 32,
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", one.record.control_port)
                proof = b"Cachefs-Addressee: %s\r\nCachefs-Proof: \xff" % one.record.incarnation.encode()
                writer.write(
                    b"GET /node HTTP/1.1\r\nHost: x\r\nCachefs-Cluster: test\r\n" + line + b"\r\n" + proof + b"\r\n\r\n"
                )
                assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
                writer.close()

    virtual_time.run(scenario())
    assert not any(record.exc_info for record in caplog.records)
    assert len(caplog.records) <= 3
