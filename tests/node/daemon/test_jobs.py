"""Jobs: publishing, leases, progress, prefetch and stalls, on a real daemon."""

import os
import subprocess
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cachefs.block import block_key
from cachefs.errors import ConfigError, NotFound
from cachefs.index import IndexReader
from cachefs.job_messages import (
    ConsumerView,
    JobEpoch,
    JobName,
    JobProgress,
    JobPublication,
    JobView,
    SampleMap,
    StallRow,
)
from cachefs.messages import REPORT_SHARE, BlockRef, DatasetView, Empty, Stall
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.rpc import JOB_CANCEL, JOB_EPOCH, JOB_LIST, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW, STALL_LIST
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.waiting import until


def write_files(directory: Path, count: int, size: int = 20_000) -> None:
    directory.mkdir()
    for number in range(count):
        (directory / f"{number:05d}").write_bytes(np.random.default_rng(number).bytes(size))


def wait_for_state(daemon: Daemon, job: str, state: str) -> JobView:
    def view() -> JobView:
        return daemon.client.call(JOB_SHOW, JobName(job=job))

    return until(view, f"job {job} is {state}", is_right=lambda view: view.state == state)


def wait_for_consumer(daemon: Daemon, job: str, is_right: Callable[[ConsumerView], bool]) -> ConsumerView:
    def consumer() -> ConsumerView:
        [view] = daemon.client.call(JOB_SHOW, JobName(job=job)).consumers
        return view

    return until(consumer, f"the consumer of job {job} is right", is_right=is_right)


def publish(daemon: Daemon, spec: SamplerSpec | None, **fields: Any) -> JobView:
    request = JobPublication(job="train", dataset="images", spec=spec, pid=os.getpid(), **fields)
    return daemon.client.call(JOB_PUBLISH, request)


def keys_in_path_order(view: DatasetView) -> list[bytes]:
    """Of all files' first blocks."""
    snapshot = Snapshot(Path(view.path))
    try:
        entries = [snapshot.entry(number) for number in range(1 + view.files + view.directories)]
        files = sorted((snapshot.path(entry.number), entry.content) for entry in entries if not entry.is_dir)
    finally:
        snapshot.close()
    return [block_key(content, 0) for _, content in files]


def test_reads_move_a_consumer_through_its_epochs(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 300, size=100)
    keys = keys_in_path_order(daemon.add_dataset("images", f"file://{tmp_path}/origin"))
    spec = SamplerSpec(kind="torch-distributed", size=300, seed=3, epochs=4)
    publish(daemon, spec)
    view = wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
    assert (view.state, view.known_epochs, view.epoch_length) == ("waiting", [0, 1, 2, 3], 300)
    for epoch in range(3):
        order = [keys[sample] for sample in epoch_order(spec, epoch)]
        for start in range(0, 300, 50):
            daemon.report(accessed=order[start : start + 50])
            place = (epoch, start + 50)
            wait_for_consumer(daemon, "train", lambda view: (view.epoch, view.position) == place)  # noqa: B023
    view = wait_for_consumer(daemon, "train", lambda view: view.state == "following")
    assert (view.matched, view.mismatched) == (900, 0)
    time.sleep(0.25)
    daemon.report(accessed=[keys[sample] for sample in epoch_order(spec, 3)[:5]])
    assert wait_for_consumer(daemon, "train", lambda view: view.epoch == 3).rate > 0
    daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=3, position=7))
    wait_for_consumer(daemon, "train", lambda view: (view.epoch, view.position) == (3, 7))
    daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=9))
    wait_for_consumer(daemon, "train", lambda view: (view.epoch, view.position) == (0, 9))


def test_a_sequence_that_is_not_read_is_told_and_found_again_in_another_epoch(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 600, size=100)
    keys = keys_in_path_order(daemon.add_dataset("images", f"file://{tmp_path}/origin"))
    spec = SamplerSpec(kind="torch-distributed", size=600, epochs=9)
    publish(daemon, spec)
    wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
    strange = [keys[sample] for sample in epoch_order(SamplerSpec(kind="numpy", size=600, seed=77), 0)]
    daemon.report(accessed=strange[:300])
    view = wait_for_consumer(daemon, "train", lambda view: view.state == "not followed")
    assert "of the latest reads are not where the sequence has them" in view.problem
    assert view.mismatched > 200
    order = [keys[sample] for sample in epoch_order(spec, 6)]
    daemon.report(accessed=order[:200])
    view = wait_for_consumer(daemon, "train", lambda view: view.state == "following")
    assert (view.epoch, view.position) == (6, 200)


def test_explicit_orders_and_what_is_wrong_with_them(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 10, size=100)
    daemon.add_dataset("images", f"file://{tmp_path}/origin")
    publish(daemon, SamplerSpec(kind="explicit", size=12))
    order = np.array([3, 11, 2, 10, 1], "<u4").tobytes()
    daemon.client.call(JOB_EPOCH, JobEpoch(job="train", consumer="0", epoch=2, order=order))
    view = wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
    assert (view.epoch, view.epoch_length, view.known_epochs) == (2, 3, [2])
    assert "epoch 2: 2 of 5 samples do not exist" in view.problem
    assert "the sampler has 12 samples, the dataset 10" in view.problem
    beat = JobProgress(job="train", consumer="0", epoch=2, position=0)
    assert daemon.client.call(JOB_PROGRESS, beat).wanted == [3]


def test_records_of_a_file_are_found_by_the_daemon_itself(tmp_path: Path) -> None:
    (tmp_path / "origin").mkdir()
    np.save(tmp_path / "origin" / "rows.npy", np.arange(1000 * 600, dtype=np.float32).reshape(1000, 600))
    with Daemon(tmp_path / "node", {"daemon": {"block_size": "128KiB"}}) as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        rows = SampleMap(kind="records", indexer="npy", paths=[b"rows.npy"])
        publish(daemon, SamplerSpec(kind="numpy", size=1000, epochs=2), map=rows)
        view = wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
        assert (view.epoch_length, view.problem) == (1000, "")
        missing = SampleMap(kind="records", indexer="npy", paths=[b"lines.npy"])
        publish(daemon, SamplerSpec(kind="numpy", size=1000), map=missing)
        view = wait_for_consumer(daemon, "train", lambda view: view.state == "not followed")
        assert "has no file lines.npy" in view.problem


@pytest.mark.own_daemon
def test_stalls_are_counted_by_job_and_epoch(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 100, size=100)
    keys = keys_in_path_order(daemon.add_dataset("images", f"file://{tmp_path}/origin"))
    daemon.report(stalls=[Stall(keys[0], 0.25, "origin")])
    publish(daemon, SamplerSpec(kind="sequential", size=100, epochs=2))
    wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
    waits = [Stall(keys[0], 0.5, "origin"), Stall(keys[1], 0.25, "ssd"), Stall(keys[2], 1.5, "origin")]
    daemon.report(accessed=keys[:3], stalls=waits)
    rows = daemon.client.call(STALL_LIST, JobName(job="train")).rows
    assert rows == [
        StallRow(job="train", consumer="0", epoch=0, source="origin", count=2, seconds=2.0, longest=1.5),
        StallRow(job="train", consumer="0", epoch=0, source="ssd", count=1, seconds=0.25, longest=0.25),
    ]
    everybody = daemon.client.call(STALL_LIST, JobName(job="")).rows
    assert [(row.job, row.count) for row in everybody] == [("", 1), ("train", 2), ("train", 1)]
    view = daemon.client.call(JOB_SHOW, JobName(job="train"))
    assert (view.stalls, view.stall_seconds) == (3, 2.25)


def test_a_job_is_published_shown_and_cancelled(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 10)
    daemon.add_dataset("images", f"file://{tmp_path}/origin")
    spec = SamplerSpec(kind="sequential", size=10, epochs=3)
    view = daemon.client.call(JOB_PUBLISH, JobPublication(job="train", dataset="images", spec=spec, source="test"))
    assert (view.job, view.dataset, view.source, view.state) == ("train", "images", "test", "running")
    assert [(one.consumer, one.known_epochs) for one in view.consumers] == [("0", [0, 1, 2])]
    [listed] = [job for job in daemon.client.call(JOB_LIST, Empty()).jobs if job.state == "running"]
    assert [(one.consumer, one.known_epochs) for one in listed.consumers] == [("0", [0, 1, 2])]
    # Other figures may have changed since: the daemon fetches ahead meanwhile.
    changing = {"consumers": [], "fetched_bytes": 0}
    assert msgspec.structs.replace(listed, **changing) == msgspec.structs.replace(view, **changing)
    daemon.client.call(JOB_CANCEL, JobName(job="train"))
    assert daemon.client.call(JOB_SHOW, JobName(job="train")).state == "cancelled"
    with pytest.raises(NotFound, match="publish first"):
        daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=1))


def test_bad_publications_are_refused_with_a_reason(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 1)
    daemon.add_dataset("images", f"file://{tmp_path}/origin")

    def publish(**fields: Any) -> None:
        daemon.client.call(JOB_PUBLISH, JobPublication(**{"job": "bad", "dataset": "images", **fields}))

    with pytest.raises(NotFound, match="no dataset named 'videos'"):
        publish(dataset="videos")
    with pytest.raises(NotFound, match="has no snapshot abc"):
        publish(snapshot="abc")
    with pytest.raises(ConfigError, match="sampler kind 'sorted': expected one of sequential"):
        publish(spec=SamplerSpec(kind="sorted", size=1))
    with pytest.raises(ConfigError, match="sampler rank 2: expected 0 to 1"):
        publish(spec=SamplerSpec(kind="torch-distributed", size=1, replicas=2, rank=2))
    with pytest.raises(ConfigError, match="cannot name a job"):
        publish(job="../x")
    for field in ("workers", "prefetch", "batch_size"):
        with pytest.raises(ConfigError, match="expected at most 4096 workers"):
            publish(**{field: 2**32})
    with pytest.raises(NotFound, match="no job named 'bad'"):
        daemon.client.call(JOB_EPOCH, JobEpoch(job="bad", consumer="0", epoch=0, order=b""))
    assert "bad" not in {job.job for job in daemon.client.call(JOB_LIST, Empty()).jobs}


def test_a_job_ends_with_its_process_or_its_lease(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 1)
    daemon.add_dataset("images", f"file://{tmp_path}/origin")
    process = subprocess.Popen(["sleep", "60"])
    try:
        for job, pid, lease in (("dies", process.pid, 0.1), ("lapses", 0, 0.1), ("lives", os.getpid(), 0.1)):
            daemon.client.call(JOB_PUBLISH, JobPublication(job=job, dataset="images", pid=pid, lease=lease))
        assert "no heartbeat" in wait_for_state(daemon, "lapses", "ended").reason
        assert daemon.client.call(JOB_SHOW, JobName(job="dies")).state == "running"
    finally:
        process.kill()
        process.wait()
    assert f"process {process.pid} has ended" in wait_for_state(daemon, "dies", "ended").reason
    assert daemon.client.call(JOB_SHOW, JobName(job="lives")).state == "running"


# --- prefetch -----------------------------------------------------------------------------------------------------


def test_what_fits_is_fetched_before_anybody_reads(daemon: Daemon, tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 300)
    daemon.add_dataset("images", f"file://{tmp_path}/origin")
    before = daemon.status().fetched_blocks
    publish(daemon, SamplerSpec(kind="numpy", size=200, epochs=2))
    until(lambda: daemon.status().fetched_blocks == before + 200)
    view = wait_for_consumer(daemon, "train", lambda view: view.ahead_bytes == 200 * 20_000)
    assert view.state == "waiting"
    until(lambda: daemon.client.call(JOB_SHOW, JobName(job="train")).fetched_bytes == 200 * 20_000)
    time.sleep(0.3)
    assert daemon.status().fetched_blocks == before + 200


def test_a_switched_off_prefetcher_fetches_nothing(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 20)
    with Daemon(tmp_path / "node", {"prefetch": {"enabled": False}}) as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        publish(daemon, SamplerSpec(kind="sequential", size=20, epochs=2))
        wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
        time.sleep(0.5)
        assert daemon.status().fetched_blocks == 0


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 4])
def test_a_full_cache_gives_up_what_was_read_for_what_is_read_next(tmp_path: Path, workers: int) -> None:
    """Origin bytes near the bound F + (E-1)(F-C), and hardly a read that has to wait."""
    files, size, epochs = 1500, 12_000, 3
    write_files(tmp_path / "origin", files, size=size)
    budget = {"memory": {"budget": "12MiB", "segment_size": "1MiB"}, "ssd": {"budget": 0}}
    budget["daemon"] = {"block_size": "128KiB"}
    with Daemon(tmp_path / "node", budget) as daemon:
        view = daemon.add_dataset("images", f"file://{tmp_path}/origin")
        keys = keys_in_path_order(view)
        spec = SamplerSpec(kind="numpy", size=files, epochs=epochs)
        publish(daemon, spec, workers=workers, batch_size=16)
        wait_for_consumer(daemon, "train", lambda view: view.epoch_length > 0)
        misses = play(daemon, view, spec, keys, workers or 1, 16)
        kept = daemon.status().tiers[0].blocks
        fetched = daemon.status().fetched_blocks
        bound = files + (epochs - 1) * (files - kept)
        print(f"{workers} workers: {fetched} of at least {bound} blocks; {misses} misses")
        assert fetched <= 1.05 * bound
        assert misses < files * epochs // 50


def play(daemon: Daemon, view: DatasetView, spec: SamplerSpec, keys: list[bytes], workers: int, batch: int) -> int:
    """Read as a mount would for a loader: 500 samples a second, and a report after each part of the tiers.

    Returns how many blocks were not there.
    """
    snapshot = Snapshot(Path(view.path))
    paths = {snapshot.size_and_content(number)[1]: number for number in range(1, 1 + view.files)}
    node = daemon.report()
    index = IndexReader(Path(node.index))
    reads_per_report = int(REPORT_SHARE * node.capacity * view.files / view.bytes)
    misses = 0
    seen: list[bytes] = []
    try:
        for epoch in range(spec.epochs):
            order = epoch_order(spec, epoch)
            batches = [order[start : start + batch] for start in range(0, len(order), batch)]
            for turn in range(0, len(batches), workers):
                for row in zip_longest(*batches[turn : turn + workers]):
                    for sample in row:
                        if sample is None:
                            continue
                        key = keys[sample]
                        if index.get(key) is None:
                            misses += 1
                            daemon.fetch(BlockRef(view.snapshot, paths[key[:16]], 0))
                        seen.append(key)
                        time.sleep(0.002)
                        if len(seen) == reads_per_report:
                            daemon.report(accessed=seen)
                            seen.clear()
    finally:
        index.close()
        snapshot.close()
    return misses
