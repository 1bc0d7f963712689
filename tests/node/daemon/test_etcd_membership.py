"""Membership by a real etcd: nodes come and go, etcd stops, dies, comes back and forgets, and all nodes agree again.

Nodes here are memberships without daemons, on the event loop of the test. Records live for 3 s, so a busy machine may
lose one now and then; what is waited for comes nevertheless.
"""

import dataclasses
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from cachefs.errors import ConfigError
from cachefs_bench.lab.ports import free_port
from cachefs_cluster.membership import last_known
from cachefs_cluster.membership.etcd import EtcdStore
from cachefs_cluster.membership.etcd_client import EtcdClient, EtcdRefused, EtcdSettings, EtcdUnavailable
from cachefs_cluster.membership.ring import Ring
from cachefs_cluster.membership.shared import SharedMembership
from cachefs_cluster.membership.view import ClusterView, NodeRecord, encode_record
from tests.certificates import Authority
from tests.members import all_active, member_id, member_record, on_loop, one_epoch, ring, state
from tests.servers import etcd as etcd_server
from tests.servers.etcd import Etcd
from tests.waiting import until_async

PREFIX: Final = "/cachefs/tests"
SECONDS: Final = 3.0
GRACE: Final = 0.5


@pytest.fixture(scope="module")
def shared_etcd() -> Iterator[Etcd]:
    with etcd_server.running() as server:
        yield server


@pytest.fixture
def etcd(shared_etcd: Etcd) -> Etcd:
    """An etcd without keys, whatever the test before has left."""
    shared_etcd.resume()
    if not shared_etcd.runs:
        shared_etcd.start()
    shared_etcd.ask("kv/deleterange", {"key": "AA==", "range_end": "AA=="})
    return shared_etcd


def is_saved(known: tuple[Ring, dict[str, NodeRecord]], view: ClusterView) -> bool:
    ring, records = known
    return ring.epoch == view.epoch and [records.get(node.id) for node in view.members] == list(view.members)


def membership(etcd: Etcd, mine: NodeRecord, grace: float = GRACE, *urls: str) -> SharedMembership:
    """urls: of more endpoints, which come first."""
    store = EtcdStore(EtcdSettings([*urls, etcd.url]), PREFIX, mine.id, SECONDS)
    state_dir = etcd.home / f"node-{mine.id}"
    state_dir.mkdir(exist_ok=True)
    return SharedMembership(store, mine, grace, state_dir, vanishing=1.0)


@asynccontextmanager
async def nodes(etcd: Etcd, *numbers: int, grace: float = GRACE) -> AsyncIterator[list[SharedMembership]]:
    """Active nodes that all know of each other."""
    async with AsyncExitStack() as stack:
        found = []
        for number in numbers:
            each = membership(etcd, member_record(number), grace)
            stack.push_async_callback(each.stop)
            found.append(each)
        await all_active(found, numbers)
        yield found


@on_loop
async def test_nodes_join_drain_and_leave(etcd: Etcd) -> None:
    seen: list[ClusterView] = []
    async with nodes(etcd, 1, 2, 3) as (first, second, third):
        first.add_listener(seen.append)
        assert [each.view.problem for each in (first, second, third)] == [""] * 3
        before = first.view.epoch
        revision = etcd.put("/other", "")
        await third.announce("draining")
        await until_async(lambda: ring(first) == ring(second) == ring(third) == [1, 2])
        # Its record, and the ring; more only where a busy machine has lost a lease: nothing is written for nothing.
        assert before < first.view.epoch <= revision + 4
        assert state(first, 3) == "draining"
        await third.stop()
        assert list(etcd.keys(f"{PREFIX}/nodes/")) == [f"{PREFIX}/nodes/{member_id(number)}" for number in (1, 2)]
        await until_async(lambda: state(first, 3) == "gone")
        # Who leaves without having drained keeps its place for the time of grace, but is not asked.
        await second.stop()
        await until_async(lambda: state(first, 2) == "away")
        await until_async(lambda: ring(first) == [1])
    assert ["away" in {each.state for each in view.members} for view in seen].count(True) >= 1
    assert etcd.keys(f"{PREFIX}/nodes/") == {}


@on_loop
async def test_a_node_that_is_back_within_the_grace_moves_nothing(etcd: Etcd) -> None:
    async with nodes(etcd, 1, 2, grace=60) as (first, second):
        epoch = first.view.epoch
        await second.stop()
        await until_async(lambda: state(first, 2) == "away")
        again = membership(etcd, member_record(2, incarnation=2), 60)
        try:
            await again.start()
            await again.announce("active")
            await until_async(lambda: state(first, 2) == "active")
            assert first.view.epoch == epoch == again.view.epoch
            assert first.view.get(member_id(2)) == dataclasses.replace(member_record(2, incarnation=2), state="active")
        finally:
            await again.stop()


@on_loop
async def test_a_node_that_died_vanishes_with_its_lease(etcd: Etcd) -> None:
    async with nodes(etcd, 1) as (first,):
        client = EtcdClient(EtcdSettings([etcd.url]))
        dead = dataclasses.replace(member_record(2), state="active")
        client.put_if(f"{PREFIX}/nodes/{dead.id}".encode(), encode_record(dead), client.grant_lease(1, 20), 0, 20)
        client.close()
        await until_async(lambda: ring(first) == [1, 2])
        await until_async(lambda: state(first, 2) == "away" or ring(first) == [1])
        await until_async(lambda: ring(first) == [1] and state(first, 2) == "gone")


@on_loop
async def test_nodes_whose_leases_or_records_are_taken_away_join_again(etcd: Etcd) -> None:
    async with nodes(etcd, 1, 2, grace=60) as found:
        epoch = found[0].view.epoch
        etcd.revoke_all()
        await until_async(lambda: len(etcd.keys(f"{PREFIX}/nodes/")) == 2)
        etcd.delete(f"{PREFIX}/nodes/{member_id(1)}")
        await until_async(lambda: len(etcd.keys(f"{PREFIX}/nodes/")) == 2)
        await until_async(lambda: all(state(each, number) == "active" for each in found for number in (1, 2)))
        assert [each.view.epoch for each in found] == [epoch, epoch]


@on_loop
async def test_while_etcd_is_stopped_the_view_stays_and_says_so(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with nodes(etcd, 1, 2, grace=60) as found:
        before = found[0].view
        etcd.pause()
        await until_async(lambda: all("does not answer" in each.view.problem for each in found))
        assert [each.view.members for each in found] == [before.members] * 2
        assert [each.view.epoch for each in found] == [before.epoch] * 2
        begun = time.monotonic()
        await found[0].refresh()
        assert time.monotonic() - begun < 10  # a second, on a machine with nothing else to do
        etcd.resume()
        await until_async(lambda: all(not each.view.problem for each in found))
        await found[1].announce("draining")
        await until_async(lambda: ring(found[0]) == [1])
    said = [message.getMessage() for message in caplog.records]
    assert sum("this node continues with the last known members" in line for line in said) == 2  # once for each node
    assert sum("etcd answers again" in line for line in said) == 2


@on_loop
async def test_an_etcd_that_comes_back_with_nothing_learns_all_again(etcd: Etcd) -> None:
    async with nodes(etcd, 1, 2, grace=60) as found:
        for number in range(20):
            etcd.put("/other", str(number))  # revisions that the new etcd does not have
        etcd.kill()
        await until_async(lambda: all("does not answer" in each.view.problem for each in found))
        etcd.wipe()
        etcd.start()
        await until_async(lambda: len(etcd.keys(f"{PREFIX}/")) == 3 and one_epoch(found))
        await until_async(lambda: all(not each.view.problem and ring(each) == [1, 2] for each in found))
        await found[1].announce("draining")
        await until_async(lambda: ring(found[0]) == ring(found[1]) == [1])


@on_loop
async def test_a_start_without_etcd_goes_on_with_what_was_known_last(etcd: Etcd) -> None:
    async with nodes(etcd, 1, 2, grace=60) as (first, second):
        before = second.view
        saved = etcd.home / f"node-{member_id(2)}"
        await until_async(
            lambda: (known := last_known.load_last_known(saved, member_id(2))) is not None and is_saved(known, before)
        )
        etcd.kill()
        await until_async(lambda: bool(first.view.problem))
        again = membership(etcd, member_record(2, incarnation=2), 60)
        unknown = membership(etcd, member_record(5))  # of no other test
        try:
            await again.start()
            await again.announce("active")
            assert (again.view.epoch, ring(again), again.view.get(member_id(1))) == (
                before.epoch, [1, 2], before.get(member_id(1)),
            )  # fmt: skip
            first.note_response(member_id(2), member_record(2, incarnation=2).incarnation)
            assert first.view.get(member_id(2)) == again.view.own_record
            # Who has never known anybody is alone, and joins later.
            await unknown.start()
            await unknown.announce("active")
            assert (unknown.view.epoch, ring(unknown), state(unknown, 5)) == (0, [], "active")
            assert "does not answer" in unknown.view.problem
            etcd.start()
            await until_async(lambda: all(ring(each) == [1, 2, 5] for each in (first, again, unknown)))
        finally:
            await again.stop()
            await unknown.stop()


@on_loop
async def test_endpoints_that_are_dead_or_silent_are_passed_over(etcd: Etcd) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        dead = f"http://127.0.0.1:{free_port()}"
        stuck = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = EtcdClient(EtcdSettings([dead, stuck, etcd.url]))
        try:
            assert client.read_range(b"/nothing", 30).count == 0
            assert client.endpoint == etcd.url
        finally:
            client.close()
        node = membership(etcd, member_record(1), GRACE, dead)
        try:
            await node.start()
            await node.announce("active")
            await until_async(lambda: ring(node) == [1])
        finally:
            await node.stop()


@on_loop
async def test_a_second_node_with_the_same_id_does_not_start(etcd: Etcd) -> None:
    async with nodes(etcd, 1) as (first,):
        copy = membership(etcd, member_record(1, incarnation=2, port=7999))
        with pytest.raises(ConfigError, match=r"node1 at 127.0.0.1:7010 runs with the id of this one .*/node here"):
            await copy.start()
        assert first.view.problem == ""


@on_loop
async def test_a_node_takes_over_from_its_killed_daemon_at_once(etcd: Etcd) -> None:
    client = EtcdClient(EtcdSettings([etcd.url]))
    killed = dataclasses.replace(member_record(1), state="active")
    client.put_if(f"{PREFIX}/nodes/{killed.id}".encode(), encode_record(killed), client.grant_lease(300, 20), 0, 20)
    client.close()
    async with nodes(etcd, 1) as (first,):
        assert '"incarnation":"0000000000000001"' in etcd.keys(f"{PREFIX}/nodes/")[f"{PREFIX}/nodes/{member_id(1)}"]
        # Should somebody start a copy while this one runs, it keeps the id, and says so.
        copy = dataclasses.replace(member_record(1, incarnation=9), host="127.0.0.9")
        etcd.put(f"{PREFIX}/nodes/{member_id(1)}", encode_record(copy).decode())
        await until_async(lambda: "runs with the id of this one" in first.view.problem)
        etcd.delete(f"{PREFIX}/nodes/{member_id(1)}")
        await until_async(lambda: not first.view.problem)


@on_loop
async def test_nonsense_in_the_store_is_passed_over(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    etcd.put(f"{PREFIX}/ring", "[[[")
    etcd.put(f"{PREFIX}/nodes/x", "{}")
    etcd.put(f"{PREFIX}/nodes/{member_id(7)}", encode_record(member_record(8)).decode())
    etcd.put(f"{PREFIX}/what", "is that")
    async with nodes(etcd, 1) as (first,):
        assert [node.name for node in first.view.members] == ["node1"]
    assert sum("is ignored" in line.getMessage() for line in caplog.records) == 3


@on_loop
async def test_two_clusters_below_one_prefix_stay_apart_and_say_so(
    etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:

        async def started(number: int, name: str) -> SharedMembership:
            each = membership(etcd, dataclasses.replace(member_record(number), cluster=name))
            stack.push_async_callback(each.stop)
            await each.start()
            await each.announce("active")
            return each

        blue = [await started(number, "blue") for number in (1, 2)]
        old = await started(3, "")  # of the last release, which knows no such thing
        await until_async(lambda: all(ring(each) == [1, 2, 3] for each in (*blue, old)))
        green = [await started(number, "green") for number in (4, 5)]
        await until_async(lambda: all(each.view.problem for each in (*blue, *green)))
        for each in green:
            assert (
                "nodes of cluster 'blue' (node1, node2) have their records in the same place of etcd"
                in each.view.problem
            )
            assert each.view.problem.endswith("until then this node shares nothing")
            assert ring(each) == []
            assert {int(one.id, 16) for one in each.view.members} <= {3, 4, 5}
        for each in blue:
            assert ring(each) == [1, 2, 3]
            assert {int(one.id, 16) for one in each.view.members} == {1, 2, 3}
        # Nobody replaces the ring of the others: it changes only as its own nodes do.
        changed = etcd.put("/other", "")
        await until_async(lambda: all("green" in each.view.problem for each in blue))
        assert etcd.put("/other", "") <= changed + 4
        # The cluster that was there goes: the other one begins.
        for each in (*blue, old):
            await each.stop()
        await until_async(lambda: all(ring(each) == [4, 5] and not each.view.problem for each in green))
    said = [one.getMessage() for one in caplog.records if "in the same place" in one.getMessage()]
    assert 4 <= len(said) <= 8  # each node of the two, once, and again where it was shut out


@on_loop
async def test_refresh_brings_what_a_watch_has_not(etcd: Etcd) -> None:
    """A refresh takes effect at once, also where nothing is new."""
    async with nodes(etcd, 1, 2) as (first, second):
        await second.announce("draining")
        await until_async(lambda: ring(second) == [1])
        await first.refresh()
        await until_async(lambda: first.view.epoch == second.view.epoch)


def test_a_watch_below_a_compaction_ends(etcd: Etcd) -> None:
    revisions = [etcd.put("/compacted", str(number)) for number in range(5)]
    etcd.compact(revisions[-1])
    client = EtcdClient(EtcdSettings([etcd.url]))
    try:
        end = next(message for message in client.watch(b"/compacted", revisions[0]) if message.has_ended)
        assert end.compacted == revisions[-1]
    finally:
        client.close()


def test_users_and_passwords(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    with etcd_server.running() as server:
        server.ask("auth/user/add", {"name": "root", "password": "root"})
        server.ask("auth/user/add", {"name": "cachefs", "password": "secret"})
        server.ask("auth/role/add", {"name": "cachefs"})
        granted = {"permType": "READWRITE", "key": "L2E=", "range_end": "L2I="}  # from /a to /b
        server.ask("auth/role/grant", {"name": "cachefs", "perm": granted})
        server.ask("auth/user/grant", {"user": "cachefs", "role": "cachefs"})
        server.ask("auth/user/grant", {"user": "root", "role": "root"})
        server.ask("auth/enable", {})
        settings = EtcdSettings([server.url], "cachefs", password)
        client = EtcdClient(settings)
        assert client.put_if(b"/a/key", b"value", 0, 0, 20).is_done
        server.kill()  # and with it every token
        with pytest.raises(EtcdUnavailable, match="does not answer"):
            client.read_range(b"/a/key", 1)
        server.start()
        patiently(client, lambda client: client.read_range(b"/a/key", 20))
        assert client.read_range(b"/a/key", 20).found[0].value == b"value"
        with pytest.raises(EtcdRefused, match="permission denied"):
            client.put_if(b"/c", b"value", 0, 0, 20)
        client.close()
        password.write_text("wrong")
        with pytest.raises(EtcdRefused, match="authentication failed"):
            EtcdClient(settings).read_range(b"/a/key", 20)
        with pytest.raises(EtcdRefused, match="user name is empty"):
            EtcdClient(EtcdSettings([server.url])).read_range(b"/a/key", 20)


def test_tls_and_certificates(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "one"), Authority(tmp_path / "other")
    server, mine, theirs = authority.issue("localhost"), authority.issue("gpu1"), other.issue("gpu1")
    options = ["--cert-file", str(server.cert), "--key-file", str(server.key), "--client-cert-auth"]
    with etcd_server.running([*options, "--trusted-ca-file", str(server.ca)]) as etcd:
        with_all = EtcdSettings([etcd.url], ca=mine.ca, certificate=mine.cert, key=mine.key)
        client = EtcdClient(with_all)
        patiently(client, lambda client: client.read_range(b"/a/", 20, prefix=True))
        client.close()
        for wrong in (
            EtcdSettings([etcd.url], ca=mine.ca),
            EtcdSettings([etcd.url], ca=theirs.ca, certificate=mine.cert, key=mine.key),
            EtcdSettings([etcd.url], ca=mine.ca, certificate=theirs.cert, key=theirs.key),
        ):
            client = EtcdClient(wrong)
            with pytest.raises(EtcdUnavailable, match="does not answer"):
                client.read_range(b"/a/", 2, prefix=True)
            client.close()
        # A certificate that is replaced is used without a restart.
        changing = tmp_path / "changing.pem"
        changing.write_bytes(theirs.cert.read_bytes())
        client = EtcdClient(EtcdSettings([etcd.url], ca=mine.ca, certificate=changing, key=mine.key))
        with pytest.raises(EtcdUnavailable, match="does not answer"):
            client.read_range(b"/a/", 2, prefix=True)
        changing.write_bytes(mine.cert.read_bytes())
        patiently(client, lambda client: client.read_range(b"/a/", 20, prefix=True))
        client.close()
    with pytest.raises(EtcdRefused, match="missing, a certificate for etcd, cannot be read: No such file"):
        EtcdClient(EtcdSettings(["https://localhost:1"], ca=tmp_path / "missing"))


def patiently(client: EtcdClient, ask: Callable[[EtcdClient], object]) -> None:
    """Ask until a server answers that has just started."""
    deadline = time.monotonic() + 30
    while True:
        try:
            ask(client)
            break
        except EtcdUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)
