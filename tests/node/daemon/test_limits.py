"""Limits of datasets on a real daemon: set, kept, shown, remembered."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachefs.errors import ConfigError, NotFound
from cachefs.job_messages import JobProgress, JobPublication
from cachefs.messages import DatasetDetail, DatasetLimit, DatasetName, DatasetView, WarmupRequest
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import DATASET_LIMIT, DATASET_REMOVE, DATASET_SHOW, JOB_PROGRESS, JOB_PUBLISH, WARMUP
from tests.daemon import Daemon, shared_daemon
from tests.waiting import until

FILES, SIZE = 200, 100_000
MEMORY, SSD = 8 << 20, 16 << 20
SETTINGS = {
    "daemon": {"block_size": "256KiB"},
    "memory": {"budget": "8MiB", "segment_size": "1MiB"},
    "ssd": {"budget": "16MiB", "segment_size": "1MiB"},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), SETTINGS) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node", SETTINGS)) as daemon:
        yield daemon


def write_files(directory: Path, seed: int) -> str:
    directory.mkdir()
    draw = np.random.default_rng(seed)
    for number in range(FILES):
        (directory / f"{number:05d}").write_bytes(draw.bytes(SIZE))
    return f"file://{directory}"


def limit(
    daemon: Daemon, name: str, share: float | None = None, ttl: float | None = None, most: int | None = None
) -> DatasetView:
    return daemon.client.call(DATASET_LIMIT, DatasetLimit(name=name, share=share, ttl=ttl, most=most))


def show(daemon: Daemon, name: str) -> DatasetDetail:
    return daemon.client.call(DATASET_SHOW, DatasetName(name=name))


def warm(daemon: Daemon, name: str) -> int:
    """Blocks that found a place."""
    return list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset=name)))[-1].blocks


def within(daemon: Daemon, name: str, share: float) -> bool:
    cached = show(daemon, name).cached
    return cached["memory"] <= share * MEMORY and cached["ssd"] <= share * SSD


def test_a_share_is_kept_over_restarts_and_leaves_room_for_others(daemon: Daemon, tmp_path: Path) -> None:
    for seed, name in enumerate(("small", "large")):
        daemon.add_dataset(name, write_files(tmp_path / name, seed))
    assert limit(daemon, "small", share=0.25).share == 0.25
    few = warm(daemon, "small")
    assert 40 <= few <= 60
    assert within(daemon, "small", 0.25)
    daemon.kill9()
    daemon.start()
    assert show(daemon, "small").dataset.share == 0.25
    # Half of the node is still free, and not theirs.
    assert warm(daemon, "small") == pytest.approx(few, abs=2)
    assert within(daemon, "small", 0.25)
    assert warm(daemon, "large") > 2 * few
    limit(daemon, "small", share=0.1)
    until(lambda: within(daemon, "small", 0.1))
    daemon.client.call(DATASET_REMOVE, DatasetName(name="small"))
    daemon.add_dataset("small", f"file://{tmp_path}/small")
    assert show(daemon, "small").dataset.share == 1


def test_a_number_of_bytes_is_kept_over_restarts(daemon: Daemon, tmp_path: Path) -> None:
    daemon.add_dataset("small", write_files(tmp_path / "small", 0))
    assert limit(daemon, "small", most=2 << 20).most == 2 << 20
    warm(daemon, "small")
    cached = show(daemon, "small").cached
    assert (1 << 20) < cached["memory"] <= 2 << 20
    assert (1 << 20) < cached["ssd"] <= 2 << 20
    daemon.kill9()
    daemon.start()
    assert show(daemon, "small").dataset.most == 2 << 20
    limit(daemon, "small", most=1 << 20)
    until(lambda: max(show(daemon, "small").cached.values()) <= 1 << 20)
    assert limit(daemon, "small", most=0, ttl=60).most == 0
    with pytest.raises(ConfigError, match="expected a number of bytes"):
        limit(daemon, "small", most=-1)


def test_prefetching_keeps_to_a_share_and_fetches_nothing_twice(tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", {**SETTINGS, "ssd": {"budget": 0}}) as daemon:
        daemon.add_dataset("images", write_files(tmp_path / "images", 1))
        limit(daemon, "images", share=0.5)
        spec = SamplerSpec(kind="torch-distributed", size=FILES, epochs=3)
        request = JobPublication(job="train", dataset="images", spec=spec, pid=os.getpid())
        daemon.client.call(JOB_PUBLISH, request)
        fitting = MEMORY // 2 // (SIZE + 4096)
        until(lambda: daemon.status().fetched_blocks >= fitting - 8)
        time.sleep(3)
        assert daemon.status().fetched_blocks <= fitting + 8
        assert within(daemon, "images", 0.5)
        for position in range(0, FILES, 4):
            daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=position))
            time.sleep(0.02)
        # What was read gave way for what is read next, and nothing else did.
        until(lambda: daemon.status().fetched_blocks >= FILES - 8)
        time.sleep(3)
        assert daemon.status().fetched_blocks <= FILES + fitting
        assert within(daemon, "images", 0.5)


def test_what_nobody_reads_is_dropped_after_its_time(tmp_path: Path) -> None:
    # There is room for both: in a full tier a block may have to leave because the index has grown by some pages.
    with Daemon(tmp_path / "node", {**SETTINGS, "ssd": {"budget": "64MiB", "segment_size": "1MiB"}}) as daemon:
        for seed, name in enumerate(("short", "long")):
            daemon.add_dataset(name, write_files(tmp_path / name, seed))
        assert limit(daemon, "short", ttl=2).ttl == 2
        warm(daemon, "long")
        warm(daemon, "short")
        before = sum(show(daemon, "long").cached.values())
        until(lambda: not sum(show(daemon, "short").cached.values()))
        assert sum(show(daemon, "long").cached.values()) == before
        assert limit(daemon, "short", share=0.5, ttl=0).ttl == 0
        assert limit(daemon, "short", ttl=60).share == 0.5


def test_limits_that_make_no_sense_are_refused(daemon: Daemon, tmp_path: Path) -> None:
    daemon.add_dataset("images", write_files(tmp_path / "images", 1))
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"share .* expected more than 0"):
            limit(daemon, "images", share=share)
    for ttl in (-1.0, 0.5, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"ttl .* expected at least 1 s"):
            limit(daemon, "images", ttl=ttl)
    with pytest.raises(NotFound, match="no dataset named 'other'"):
        limit(daemon, "other", share=0.5)
