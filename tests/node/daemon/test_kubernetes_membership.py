"""Membership by Leases of Kubernetes, against a small server with their API (see tests/servers/api_server.py)."""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from cachefs.errors import ConfigError
from cachefs_cluster.membership.kubernetes import RECORD, KubernetesStore
from cachefs_cluster.membership.kubernetes_api import LeaseApiSettings, pod_settings
from cachefs_cluster.membership.shared import SharedMembership
from cachefs_cluster.membership.view import NodeRecord, encode_record
from tests.certificates import Authority
from tests.members import all_active, member_id, member_record, on_loop, one_epoch, ring, state
from tests.scheduler.kube.manifests import DEPLOY, manifest
from tests.servers.api_server import ApiServer, running
from tests.waiting import until_async

NAMESPACE: Final = "training"
SECONDS: Final = 3.0
GRACE: Final = 0.5


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with running() as found:
        found.namespace = NAMESPACE
        # A daemon may do no more than the manifests let it.
        found.rules = manifest(DEPLOY / "base" / "daemons-access.yaml", "Role")["rules"]
        yield found


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The directory of a service account."""
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text(NAMESPACE)
    return tmp_path


def membership(server: ApiServer, account: Path, mine: NodeRecord, grace: float = GRACE) -> SharedMembership:
    store = KubernetesStore(LeaseApiSettings(server.url, NAMESPACE, account), "tests", mine.id, SECONDS)
    return SharedMembership(store, mine, grace, account, vanishing=0.5)


@asynccontextmanager
async def nodes(
    server: ApiServer, account: Path, *numbers: int, grace: float = GRACE
) -> AsyncIterator[list[SharedMembership]]:
    async with AsyncExitStack() as stack:
        found = [membership(server, account, member_record(number), grace) for number in numbers]
        for each in found:
            stack.push_async_callback(each.stop)
        await all_active(found, numbers)
        yield found


def held(server: ApiServer) -> list[str]:
    """Ends of the names of all Leases."""
    return sorted(name.rpartition("-")[2] for name in server.leases(NAMESPACE))


@on_loop
async def test_nodes_join_drain_leave_and_die(server: ApiServer, account: Path) -> None:
    async with nodes(server, account, 1, 2, 3) as (first, second, third):
        epoch = first.view.epoch
        await third.announce("draining")
        await until_async(lambda: ring(first) == ring(second) == ring(third) == [1, 2])
        assert first.view.epoch > epoch
        await third.stop()
        assert held(server) == [member_id(1), member_id(2), "ring"]
        await until_async(lambda: state(first, 3) == "gone")
        # A node that dies leaves its Lease, which nobody renews: it goes out of the ring, and is removed.
        dead = dataclasses.replace(member_record(4), state="active")
        name = next(iter(server.leases(NAMESPACE))).rpartition("-")[0] + f"-{dead.id}"
        lease = server.leases(NAMESPACE)[name.replace(dead.id, member_id(1))]
        lease = {**lease, "metadata": {**lease["metadata"], "name": name}}
        lease["metadata"]["annotations"] = {RECORD: encode_record(dead).decode()}
        server.put_lease(lease, NAMESPACE)
        await until_async(lambda: ring(first) == [1, 2, 4])
        await until_async(lambda: ring(first) == ring(second) == [1, 2])
        await until_async(lambda: held(server) == [member_id(1), member_id(2), "ring"])


@on_loop
async def test_a_watch_that_is_too_old_lists_again(server: ApiServer, account: Path) -> None:
    async with nodes(server, account, 1, 2, grace=60) as found:
        for _ in range(3):
            server.compact()
        await found[1].announce("draining")
        await until_async(lambda: ring(found[0]) == [1])
        assert found[0].view.problem == ""
        server.remove("leases", next(name for name in server.leases(NAMESPACE) if name.endswith(member_id(1))))
        await until_async(lambda: held(server) == [member_id(1), member_id(2), "ring"])


@on_loop
async def test_while_the_api_server_is_away_the_view_stays(server: ApiServer, account: Path) -> None:
    async with nodes(server, account, 1, 2, grace=60) as found:
        before = found[0].view
        server.down = True
        await until_async(lambda: all("API server" in each.view.problem for each in found))
        assert [each.view.members for each in found] == [before.members] * 2
        await found[0].refresh()
        server.down = False
        await until_async(lambda: all(not each.view.problem for each in found))
        await until_async(lambda: one_epoch(found) and ring(found[0]) == [1, 2])


@on_loop
async def test_a_token_is_read_again(server: ApiServer, account: Path) -> None:
    async with nodes(server, account, 1) as (first,):
        server.token = "second"
        await until_async(lambda: "401: Unauthorized" in first.view.problem)
        (account / "token").write_text("second")
        await until_async(lambda: not first.view.problem)


@on_loop
async def test_a_second_node_with_the_same_id_does_not_start(server: ApiServer, account: Path) -> None:
    async with nodes(server, account, 1) as (first,):
        copy = membership(server, account, member_record(1, incarnation=2, port=7999))
        with pytest.raises(ConfigError, match=r"node1 at 127.0.0.1:7010 runs with the id of this one"):
            await copy.start()
        assert first.view.problem == ""
        again = membership(server, account, member_record(1, incarnation=3))  # at the same address: the first is dead
        await again.start()
        await until_async(lambda: "runs with the id" in first.view.problem)
        await again.stop()
        await until_async(lambda: not first.view.problem)


@on_loop
async def test_what_the_service_account_may_not_do_is_said(server: ApiServer, account: Path) -> None:
    mine = member_record(1)
    store = KubernetesStore(LeaseApiSettings(server.url, "other", account), "tests", mine.id, SECONDS)
    node = SharedMembership(store, mine, GRACE, account)
    await node.start()
    await until_async(lambda: "its role needs get, list, watch, create, update and delete" in node.view.problem)
    await node.stop()


def test_outside_of_a_pod(monkeypatch: pytest.MonkeyPatch, account: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="this daemon does not run in a Kubernetes pod"):
        pod_settings("")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert pod_settings("", account) == LeaseApiSettings("https://[fd00::1]:6443", NAMESPACE, account)
    with pytest.raises(ConfigError, match="give the pod a service account"):
        pod_settings("", account / "nothing")


@on_loop
async def test_a_ca_that_is_not_there_yet_is_waited_for(server: ApiServer, account: Path) -> None:
    """As where the volume of the service account is a moment behind the pod."""
    mine = member_record(1)
    url = server.url.replace("http://", "https://")
    store = KubernetesStore(LeaseApiSettings(url, NAMESPACE, account), "tests", mine.id, SECONDS)
    found = SharedMembership(store, mine, GRACE, account, vanishing=0.5)
    try:
        await found.start()
        await until_async(lambda: "ca.crt" in found.view.problem)
        (Authority(account / "authority")._path).rename(account / "ca.crt")
        await until_async(lambda: found.view.problem and "ca.crt" not in found.view.problem)  # it is no TLS server
    finally:
        await found.stop()
