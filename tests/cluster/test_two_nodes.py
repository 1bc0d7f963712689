"""Two nodes on loopback: a dataset that is added on one is on both, each byte leaves the origin once, one may die, and
another user of the machine can do nothing with their ports."""

import encodings.idna  # the other user cannot read this interpreter's files
import http.client
import multiprocessing
import os
import socket
from collections.abc import Iterator

import pytest

from cachefs.block import block_key
from cachefs.messages import Empty
from cachefs.rpc import CLUSTER
from cachefs.snapshot import Snapshot
from cachefs_cluster.membership.handshake import Greeting
from cachefs_cluster.peers.protocol import BlocksRequest, RequestedBlock, encode_blocks_request
from tests.cluster.nodes import SmallCluster, small_cluster
from tests.servers.s3 import S3Server

_OTHER_USER = 65534


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, rclone: S3Server) -> Iterator[SmallCluster]:
    with small_cluster(tmp_path_factory.mktemp("c"), rclone, "two-nodes", 2, {"grace": 2}) as running:
        yield running


def test_two_nodes_are_one_cache(small: SmallCluster) -> None:
    one, two = small.nodes
    listed = small.throttle.read_counters()
    assert small.wrong(two) == []
    assert small.wrong(one) == []
    read = small.throttle.read_counters()
    assert read.bytes - listed.bytes == sum(map(len, small.files.values()))
    assert read.requests - listed.requests <= len(small.files)
    one.kill()
    assert small.wrong(two) == []
    small.start(one)
    assert small.wrong(one) == []
    assert small.wrong(two) == []


def test_another_user_is_no_node(small: SmallCluster) -> None:
    one, _ = small.nodes
    assert small.wrong(one) == []
    status = one.client.call(CLUSTER, Empty())
    first, second = (next(each for each in status.members if each.name == node.name) for node in small.nodes)
    path = next((one.work / "state" / "snapshots").glob("*.snapshot"))
    snapshot = Snapshot(path)
    entry, size, content = next(iter(snapshot.contents()))
    asked = RequestedBlock(snapshot.id, entry, 0, block_key(content, 0), size)
    greeting = Greeting("default", second.id, first.id, first.incarnation, status.epoch)
    question = encode_blocks_request(BlocksRequest([asked], may_fetch=True), greeting, 3.0)
    said = _as_another_user(first.host, first.data_port, question, second.id)
    assert said["blocks"].startswith(b"HTTP/1.1 403 ")
    assert not any(content[:200] in said["blocks"] for content in small.files.values())
    assert said["drain"] == 403
    assert {member.state for member in one.client.call(CLUSTER, Empty()).members} == {"active"}
    assert "does not prove that it knows this cluster's secret" in one.log.read_text()


def _as_another_user(host: str, port: int, question: bytes, node: str) -> dict:  # type: ignore[type-arg]
    """Ask for a block, and to drain, as the node called that."""
    assert encodings.idna
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe()

    def ask() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_OTHER_USER)
            os.setuid(_OTHER_USER)
        found = b""
        with socket.create_connection((host, port), 10) as connection:
            connection.settimeout(10)
            connection.sendall(question)
            while data := connection.recv(1 << 16):
                found += data
        client = http.client.HTTPConnection(host, port + 1, timeout=10)
        client.request("POST", "/drain", headers={"Cachefs-Cluster": "default", "Cachefs-Node": node})
        theirs.send({"blocks": found, "drain": client.getresponse().status})

    process = forks.Process(target=ask)
    process.start()
    try:
        assert ours.poll(60), "the other user is not answered"
        return ours.recv()
    finally:
        process.join(10)
