"""The clients of `cachefs-bench origin` get what they should, whole and in ranges."""

import pytest
from cachefs_tools.bench import origin_get
from cachefs_tools.bench.origin_get import Load
from cachefs_tools.bench.origin_server import BUCKET, OriginServer
from cachefs_tools.bench.sample_data import sample_name
from cachefs_tools.scratch_node import Account

from tests.servers.s3 import S3Server

SIZE, FILES = 3000, 3


@pytest.fixture(scope="module")
def server(rclone: S3Server) -> OriginServer:
    rclone.create_bucket(BUCKET)
    rclone.put(BUCKET, {sample_name(number): bytes([number]) * SIZE for number in range(FILES)})
    return OriginServer(rclone.endpoint, Account(rclone.access_key, rclone.secret_key))


@pytest.mark.parametrize("client", origin_get.CLIENTS)
@pytest.mark.parametrize("bytes_each", [SIZE, SIZE // 3])
def test_each_client(server: OriginServer, client: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # what the benchmark sets is taken back
    cost = origin_get._turn(client, Load(server, bytes_each, FILES, SIZE, 20, 4))
    assert cost.cpu > 0
    assert cost.rate > 0
    figures = origin_get._figures([cost], bytes_each)
    assert figures["gb_per_second"] == pytest.approx(figures["per_second"] * bytes_each / 1e9, abs=1e-3)
