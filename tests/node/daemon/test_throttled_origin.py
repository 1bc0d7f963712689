"""The daemon in front of an S3 server that refuses what comes too fast: readers notice nothing, and status tells."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cachefs.messages import DatasetView, OriginOptions
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_tools.cachectl.status import describe_endpoint
from tests.daemon import Daemon, block_ref
from tests.servers.s3 import S3Server

BLOCK = 128 << 10
FILES = {f"{number:03}": random.Random(number).randbytes(1000) for number in range(150)}
LARGE = random.Random(1).randbytes(20 * BLOCK)


@pytest.fixture(scope="module")
def throttle(radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Throttle]:
    radosgw.create_bucket("throttled")
    radosgw.put("throttled", {**{f"data/{name}": data for name, data in FILES.items()}, "data/large": LARGE})
    with run_throttle(radosgw.endpoint, LinkLimits(), tmp_path_factory.mktemp("proxy") / "log") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def daemon(radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    sections = {"daemon": {"block_size": BLOCK}, "origin": {"max_connections": 16}}
    with Daemon(tmp_path_factory.mktemp("node"), sections, radosgw.environment) as running:
        yield running


@pytest.fixture(scope="module")
def view(daemon: Daemon, throttle: Throttle) -> DatasetView:
    options = OriginOptions(endpoint_url=throttle.endpoint, addressing_style="path")
    return daemon.add_dataset("d", "s3://throttled/data", options)


def test_no_reader_sees_that_the_server_throttles(daemon: Daemon, view: DatasetView, throttle: Throttle) -> None:
    throttle.set_limits(LinkLimits(request_rate=100))
    try:
        refs = [block_ref(view, name) for name in FILES]
        with ThreadPoolExecutor(50) as readers:
            answers = list(readers.map(daemon.fetch, refs))
        assert all(one.location for [one] in answers)
        assert {name: daemon.read(view, name) for name in FILES} == FILES
    finally:
        throttle.set_limits(LinkLimits())
    status = daemon.status()
    assert status.errors == []
    [endpoint] = status.endpoints
    assert endpoint.throttled == throttle.read_counters().refused > 0
    assert 1 <= endpoint.width <= endpoint.most == 16
    assert endpoint.hedged == 0
    line = describe_endpoint(endpoint)
    assert f"{endpoint.width} of 16 requests at once" in line
    assert f"{endpoint.throttled:,} throttled" in line
    assert "has not answered" not in daemon.log.read_text()


def test_blocks_that_wait_come_in_fewer_requests(daemon: Daemon, view: DatasetView, throttle: Throttle) -> None:
    before = throttle.read_counters().requests
    assert daemon.read(view, "large") == LARGE
    assert throttle.read_counters().requests - before < 20
