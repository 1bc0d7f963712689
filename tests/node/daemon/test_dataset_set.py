"""`cachectl dataset set`: another endpoint for a dataset, while it is read."""

import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cachefs.errors import CachefsError, ConfigError
from cachefs.messages import DatasetName, DatasetSetRequest, DatasetSetResult, Empty, OriginChange, OriginOptions
from cachefs.rpc import DATASET_LIST, DATASET_SET, DATASET_SHOW
from cachefs_bench.lab.ports import free_port
from tests.daemon import Daemon, shared_daemon
from tests.node.daemon.test_cluster_datasets import datasets, two_daemons
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.s3 import S3Server
from tests.waiting import until

OBJECTS = {f"set/{number:02}": bytes([number]) * 50_000 for number in range(10)}


@pytest.fixture
def bucket(radosgw: S3Server) -> str:
    name = f"set{uuid.uuid4().hex[:12]}"
    radosgw.create_bucket(name)
    radosgw.put(name, OBJECTS)
    return name


@pytest.fixture
def old(radosgw: S3Server) -> Iterator[FaultyProxy]:
    with faulty.running(radosgw.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, radosgw: S3Server) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), environment=radosgw.environment) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path, radosgw: S3Server) -> Iterator[Daemon]:
    own = partial(Daemon, tmp_path / "node", environment=radosgw.environment)
    with shared_daemon(request, lambda: running, own) as daemon:
        yield daemon


def change(daemon: Daemon, name: str = "d", unchecked: bool = False, **options: str | bool | None) -> DatasetSetResult:
    request = DatasetSetRequest(name=name, change=OriginChange(**options), unchecked=unchecked)
    return daemon.client.call(DATASET_SET, request)


def test_what_is_cached_stays_and_the_rest_comes_from_the_new_endpoint(
    daemon: Daemon, old: FaultyProxy, radosgw: S3Server, bucket: str
) -> None:
    options = OriginOptions(endpoint_url=old.endpoint, region="us-east-1")
    view = daemon.add_dataset("d", f"s3://{bucket}/set", options)
    assert daemon.read(view, "03") == OBJECTS["set/03"]
    reached = change(daemon, endpoint_url=radosgw.endpoint)
    assert (reached.looked_at, reached.alike) == (10, 10)
    assert reached.now == OriginOptions(endpoint_url=radosgw.endpoint, region="us-east-1")
    assert reached.dataset.snapshot == view.snapshot
    requests = len(old.requests)
    assert daemon.read(view, "04") == OBJECTS["set/04"]
    assert len(old.requests) == requests
    fetched = daemon.status().fetched_blocks
    for _ in range(2):  # also after a restart
        again = daemon.refresh_dataset("d")
        assert again.diff is not None
        assert again.diff.unchanged == 10
        assert again.dataset is not None
        assert again.dataset.snapshot == view.snapshot
        assert daemon.read(again.dataset, "03") == OBJECTS["set/03"]
        assert daemon.status().fetched_blocks == fetched
        daemon.stop()
        daemon.start()
        fetched = 0
    assert daemon.client.call(DATASET_SHOW, DatasetName(name="d")).options.endpoint_url == radosgw.endpoint
    assert len(old.requests) == requests


def test_a_read_that_waits_for_an_endpoint_that_is_gone_gets_its_bytes_from_the_new_one(
    daemon: Daemon, old: FaultyProxy, radosgw: S3Server, bucket: str
) -> None:
    view = daemon.add_dataset("d", f"s3://{bucket}/set", OriginOptions(endpoint_url=old.endpoint))
    old.add(Fault(status=503, times=None))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(daemon.read(view, "05", deadline=60)))
    reader.start()
    until(lambda: old.count(path="/set/05") > 0)
    change(daemon, endpoint_url=radosgw.endpoint)
    reader.join(60)
    assert got == [OBJECTS["set/05"]]


def test_an_endpoint_that_does_not_have_it_is_refused(daemon: Daemon, radosgw: S3Server, bucket: str) -> None:
    view = daemon.add_dataset("d", f"s3://{bucket}/set", OriginOptions(endpoint_url=radosgw.endpoint))
    with pytest.raises(CachefsError, match=r"127\.0\.0\.1"):
        change(daemon, endpoint_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="must be"):
        change(daemon, addressing_style="sideways")
    with pytest.raises(CachefsError):
        change(daemon, profile="nobody")
    shown = daemon.client.call(DATASET_SHOW, DatasetName(name="d"))
    assert shown.options == OriginOptions(endpoint_url=radosgw.endpoint)
    assert daemon.read(view, "06") == OBJECTS["set/06"]
    assert change(daemon, unchecked=True, endpoint_url="http://127.0.0.1:1").looked_at == 0
    change(daemon, endpoint_url=radosgw.endpoint)
    assert daemon.read(view, "07") == OBJECTS["set/07"]
    radosgw.put(bucket, {key: value + b"x" for key, value in OBJECTS.items()})
    with pytest.raises(
        ConfigError, match=r"none of the first 10 objects there has the size and version that were listed.*--unchecked"
    ):
        change(daemon, region="us-east-1")


def test_all_nodes_of_a_cluster_take_it_over(
    tmp_path: Path, radosgw: S3Server, old: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in radosgw.environment.items():
        monkeypatch.setenv(key, value)
    with two_daemons(tmp_path) as (first, second):
        first.add_dataset("d", f"s3://{bucket}/set", OriginOptions(endpoint_url=old.endpoint))
        until(lambda: "d" in datasets(second))
        change(second, endpoint_url=radosgw.endpoint)
        until(lambda: datasets(first)["d"].reached == radosgw.endpoint)
        second.stop()
        change(first, endpoint_url=old.endpoint, region="us-east-1")
        second.start()
        until(lambda: datasets(second)["d"].reached == f"{old.endpoint}, region us-east-1")
        fresh = first.refresh_dataset("d").dataset
        assert fresh is not None
        until(lambda: datasets(second)["d"].snapshot == fresh.snapshot)
        assert datasets(first)["d"].reached == datasets(second)["d"].reached
        assert len(second.client.call(DATASET_LIST, Empty()).datasets) == 1
