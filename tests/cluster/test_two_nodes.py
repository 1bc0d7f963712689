"""Two nodes on loopback: what is added on one is there on both, each byte leaves the origin once, and one may die."""

from pathlib import Path

from tests.cluster.nodes import small_cluster
from tests.servers.s3 import S3Server


def test_two_nodes_are_one_cache(tmp_path: Path, rclone: S3Server) -> None:
    with small_cluster(tmp_path, rclone, "two-nodes", 2, {"grace": 2}) as small:
        one, two = small.nodes
        listed = small.throttle.counters()
        assert small.wrong(two) == []
        assert small.wrong(one) == []
        read = small.throttle.counters()
        assert read.bytes - listed.bytes == sum(map(len, small.files.values()))
        assert read.requests - listed.requests <= len(small.files)
        one.kill()
        assert small.wrong(two) == []
        one.start(small.cluster.settings_of(one))
        one.mount("set")
        assert small.wrong(one) == []
        assert small.wrong(two) == []
