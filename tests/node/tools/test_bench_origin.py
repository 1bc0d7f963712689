"""The clients of `cachefs-bench origin` get what they should, whole and in ranges."""

from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_bench import origin_get, origin_limits
from cachefs_bench.lab.scratch_node import S3Credentials
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import run_throttle
from cachefs_bench.origin_get import GetLoad
from cachefs_bench.origin_server import BUCKET, OriginServer
from cachefs_bench.sample_data import sample_name
from tests.servers.s3 import S3Server

SIZE, FILES = 3000, 3


@pytest.fixture(scope="module")
def server(rclone: S3Server) -> OriginServer:
    rclone.create_bucket(BUCKET)
    rclone.put(BUCKET, {sample_name(number): bytes([number]) * SIZE for number in range(FILES)})
    return OriginServer(rclone.endpoint, S3Credentials(rclone.access_key, rclone.secret_key))


@pytest.mark.parametrize("client", origin_get.CLIENTS)
@pytest.mark.parametrize("bytes_each", [SIZE, SIZE // 3])
def test_each_client(server: OriginServer, client: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # what the benchmark sets is taken back
    cost = origin_get._run_turn(client, GetLoad(server, bytes_each, FILES, SIZE, 20, 4))
    assert cost.cpu > 0
    assert cost.rate > 0
    figures = origin_get._figures([cost], bytes_each)
    assert figures["gb_per_second"] == pytest.approx(figures["per_second"] * bytes_each / 1e9, abs=1e-3)


def test_reads_from_a_server_that_throttles_and_is_slow(
    server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # what the benchmark sets is taken back
    limits = LinkLimits(latency=0.001, slow_share=0.1, slow_factor=2, request_rate=1000)
    with run_throttle(server.endpoint, limits, tmp_path / "proxy.log") as proxy:
        found = origin_limits.run_reads(GetLoad(server, SIZE, FILES, SIZE, 30, 4), proxy.endpoint, 0.02)
        assert found["errors"] == 0
        assert proxy.read_counters().requests == 30 + found["throttled"] + found["hedged"]


def test_what_is_slow_is_a_share_and_a_factor() -> None:
    assert origin_limits.proxy_limits(500, "0.01x50") == LinkLimits(
        0.05, slow_share=0.01, slow_factor=50, request_rate=500
    )
    with pytest.raises(ConfigError, match="expected a share and a factor"):
        origin_limits.proxy_limits(0, "a lot")
