"""A real Prometheus scrapes a daemon under load and failures: its figures add up, and are those of proxy and server."""

import os
import random
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs.job_messages import JobPublication
from cachefs.messages import DatasetName, OriginOptions, Selection, WarmupRequest
from cachefs.mount import kernel
from cachefs.rpc import DATASET_REMOVE, EVICT, JOB_PUBLISH, WARMUP
from cachefs_bench.lab.ports import free_port
from cachefs_daemon.datasets import records
from cachefs_daemon.datasets.records import Registry
from cachefs_daemon.metrics.table import CARD, TABLE, MetricKind
from tests.daemon import Daemon
from tests.mounting import drop_pages, mounted, mounts_at, read_tree
from tests.servers import faulty, prometheus
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.prometheus import Prometheus
from tests.servers.s3 import S3Server
from tests.waiting import until

BLOCK = 128 << 10
FILES = {f"{number:02}": 60_000 + 10_000 * number for number in range(24)}
SENT = 'sum(cachefs_origin_requests_total{kind="s3",outcome!="unreachable"})'
RECEIVED = 'sum(cachefs_origin_received_bytes_total{purpose="read"})'
FETCHED = 'sum(cachefs_fetched_bytes_total{source="origin"})'


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def daemon(tmp_path: Path, port: int, radosgw: S3Server) -> Iterator[Daemon]:
    sections = {
        "daemon": {"block_size": BLOCK, "read_deadline": 20},
        "metrics": {"listen": f"127.0.0.1:{port}"},
        "prefetch": {"processes": 1, "guess": False},
    }
    with Daemon(tmp_path / "node", sections, radosgw.environment) as running:
        yield running


def scraped(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """By metric and the values of its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(one.labels[name] for name in sorted(one.labels))] = one.value
    return found


def settled(daemon: Daemon, proxy: FaultyProxy, seen: Prometheus) -> None:
    """What Prometheus has seen is what the proxy has, and it adds up."""
    until(lambda: not daemon.status().in_flight_blocks)
    assert seen.until(SENT, lambda value: value == len(proxy.requests)) == len(proxy.requests)
    assert seen.until("sum(cachefs_origin_requests_in_flight)", lambda value: not value) == 0
    received = seen.ask(RECEIVED)
    assert received is not None
    assert seen.until(FETCHED, lambda value: value == received) == received
    reads = 'sum(cachefs_origin_requests_total{purpose="read"})'
    assert seen.ask(reads) == daemon.status().origin_requests
    failed = f'{reads.removesuffix("})")},outcome!~"answered|cancelled"}}) + sum(cachefs_origin_wrong_answers_total)'
    assert seen.ask(failed) == daemon.status().origin_errors


def test_counters_of_daemon_proxy_and_server_agree(
    tmp_path: Path, daemon: Daemon, port: int, radosgw: S3Server
) -> None:
    content = {key: random.Random(key).randbytes(size) for key, size in FILES.items()}
    radosgw.create_bucket("metrics")
    radosgw.put("metrics", {f"a/{key}": data for key, data in content.items()})
    radosgw.put("metrics", {f"b/{key}": data for key, data in list(content.items())[:6]})
    with (
        faulty.running(radosgw.endpoint) as server,
        faulty.running(server.endpoint) as proxy,
        prometheus.running(f"127.0.0.1:{port}") as seen,
    ):
        where = OriginOptions(endpoint_url=proxy.endpoint, addressing_style="path")
        daemon.add_dataset("a", "s3://metrics/a", where)
        daemon.add_dataset("b", "s3://metrics/b", where)
        faults = [
            Fault("/a/", times=3, status=503),
            Fault("/a/", times=2, drop=True),
            Fault("/a/", times=3, truncate=30_000),
            Fault("/a/", times=2, cut=20),
        ]
        unseen = 3 + 2
        for fault in faults:
            proxy.add(fault)
        with mounted(daemon.socket, "a", tmp_path / "m", "workers=1") as directory:
            assert read_tree(directory) == {key.encode(): data for key, data in content.items()}
            settled(daemon, proxy, seen)
            _warm_up_by_process(daemon)
            settled(daemon, proxy, seen)
            os.kill(daemon.status().fetch_processes[0].pid, signal.SIGKILL)
            settled(daemon, proxy, seen)
            radosgw.put("metrics", {"a/00": b"another one"})
            daemon.refresh_dataset("a")
            kernel.unmount(directory)
        with mounted(daemon.socket, "a", tmp_path / "m", "workers=1") as directory:
            assert (directory / "00").read_bytes() == b"another one"
            drop_pages(directory)
            read_tree(directory)
            settled(daemon, proxy, seen)
            before = daemon.status()
            daemon.client.call(DATASET_REMOVE, DatasetName(name="b"))
            assert daemon.status().origin_requests == before.origin_requests
            settled(daemon, proxy, seen)
            assert len(server.requests) == len(proxy.requests) - unseen, "the server has seen what was let through"
            # A node in no cluster receives nothing over network cards.
            counters = [one.full_name for one in TABLE if one.kind is MetricKind.COUNTER and CARD not in one.labels]
            assert {name: seen.ask(f"max(resets({name}[5m]))") for name in counters} == dict.fromkeys(counters, 0)
            assert (seen.ask("max(scrape_samples_scraped)") or 0) < 300
            _restart(daemon, seen, directory)


def _warm_up_by_process(daemon: Daemon) -> None:
    """Blocks that nobody waits for are brought by a fetch process, once it is there."""

    def warm_up() -> bool:
        list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="b"), timeout=60))
        daemon.client.call(EVICT, Selection(dataset="b"))
        return any(process.blocks for process in daemon.status().fetch_processes)

    until(warm_up, "a fetch process brings blocks")


def _restart(daemon: Daemon, seen: Prometheus, directory: Path) -> None:
    """The mount lives on, and what it has counted for the daemon before does not count again."""

    (mount,) = mounts_at(daemon.client, directory)

    def told() -> int:
        """Reads that waited, as the mount counts them since it began."""
        return sum(one.counters.get("misses", 0) for one in daemon.status().mounts if one.id == mount.id)

    earlier = told()
    assert earlier > 0
    daemon.stop()
    daemon.start()

    def read_again() -> int:
        drop_pages(directory)
        read_tree(directory)
        return told()

    until(read_again, "the mount has reported", is_right=lambda reads: reads >= earlier)
    status = daemon.status()
    assert told() - status.misses >= earlier
    assert (status.fetched_blocks, status.origin_requests) == (0, 0)
    seen.until("max(cachefs_start_time_seconds) - min(min_over_time(cachefs_start_time_seconds[5m]))", bool)
    assert (seen.ask('sum(cachefs_reads_total{answered_by="fetch"})') or 0) < earlier


def test_a_thousand_datasets_and_64_jobs_make_few_series(tmp_path: Path, daemon: Daemon, port: int) -> None:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "file").write_bytes(bytes(100))
    daemon.add_dataset("d", f"file://{tmp_path}/origin")
    few = Counter({name: len(values) for name, values in scraped(port).items()})
    daemon.stop()
    state = daemon.home / "state"
    (one,) = records.load(state).datasets
    many = [one, *(records.DatasetRecord(f"d{n}", one.url, one.options, one.snapshots) for n in range(999))]
    records.save(state, Registry(datasets=many))
    daemon.start()
    for number in range(64):
        daemon.client.call(
            JOB_PUBLISH, JobPublication(job=f"job-{number}", dataset=f"d{number}", lease=600, source="test")
        )
    found = scraped(port)
    assert found["cachefs_datasets"][()] == 1000
    assert found["cachefs_jobs"][("running",)] == 64
    assert {name: len(values) for name, values in found.items()} == few
