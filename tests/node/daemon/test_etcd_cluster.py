"""Two real daemons and a real etcd: what cachectl shows of nodes that start, die, come back and leave."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cluster_messages import ClusterStatus
from cachefs.messages import Empty
from cachefs.rpc import CLUSTER
from cachefs_bench.lab.ports import free_ports
from tests.cachectl import cachectl_says
from tests.daemon import Daemon
from tests.servers import etcd as etcd_server
from tests.servers.etcd import Etcd
from tests.waiting import until


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with etcd_server.running() as server:
        yield server


def node(home: Path, etcd: Etcd) -> Daemon:
    listen = f"127.0.0.1:{free_ports(2)[0]}"
    own = {"membership": "etcd", "etcd": [etcd.url], "name": home.name, "listen": listen, "zone": "r1", "grace": 600}
    return Daemon(home, {"cluster": own})


def cluster(daemon: Daemon) -> ClusterStatus:
    return daemon.client.call(CLUSTER, Empty())


def states(daemon: Daemon) -> dict[str, str]:
    return {member.name: member.state for member in cluster(daemon).members}


def test_nodes_start_die_come_back_and_leave(tmp_path: Path, etcd: Etcd) -> None:
    with node(tmp_path / "a", etcd) as first, node(tmp_path / "b", etcd) as second:
        both = {"a": "active", "b": "active"}
        until(lambda: states(first) == states(second) == both)
        until(lambda: [member.placing for member in cluster(first).members] == [True, True])
        before = cluster(first)
        assert (before.source, before.problem, before.remarks) == ("etcd", "", [])
        assert sum(member.share for member in before.members) == pytest.approx(1)
        assert re.search(r"^a\* +active 50.0 % r1 ", cachectl_says(first.socket, "cluster"), re.MULTILINE)
        assert json.loads(cachectl_says(first.socket, "cluster", "--json"))["members"][1]["zone"] == "r1"
        assert "cluster    default: 2 active; ring epoch" in cachectl_says(first.socket, "status")

        # A daemon that was killed takes its own record over, and nothing has moved.
        second.kill9()
        second.start()
        until(lambda: cluster(first).members[1].incarnation != before.members[1].incarnation)
        until(lambda: states(first) == states(second) == both)
        assert cluster(first).epoch == cluster(second).epoch == before.epoch
        assert cluster(first).members[1].id == (second.home / "state" / "node").read_text().strip()

        second.stop()
        until(lambda: states(first) == {"a": "active", "b": "away"})
        assert cluster(first).epoch == before.epoch
