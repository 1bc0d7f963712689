"""A daemon is killed in the middle of a training run: the next one knows what the job will read, and goes on."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cachefs.job_messages import (
    ConsumerView,
    JobEpoch,
    JobList,
    JobName,
    JobProgress,
    JobPublication,
    JobView,
    SampleMap,
)
from cachefs.messages import Empty
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_CANCEL, JOB_EPOCH, JOB_LIST, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.waiting import until

FILES, SIZE = 500, 100_000
SMALL = {
    "daemon": {"block_size": "256KiB"},
    "memory": {"budget": "12MiB", "segment_size": "1MiB"},
    "ssd": {"budget": 0},
}


def write_files(directory: Path, count: int, size: int) -> list[str]:
    directory.mkdir()
    content = np.random.default_rng(5).bytes(size)
    names = [f"{number:05d}" for number in range(count)]
    for name in names:
        (directory / name).write_bytes(name.encode() + content)
    return names


def publish(daemon: Daemon, job: str = "train", **fields: Any) -> JobView:
    return daemon.client.call(JOB_PUBLISH, JobPublication(job=job, dataset="images", **fields))


def jobs(daemon: Daemon) -> list[str]:
    reply: JobList = daemon.client.call(JOB_LIST, Empty())
    return [view.job for view in reply.jobs]


def wait_for(daemon: Daemon, is_right: Callable[[ConsumerView], bool]) -> ConsumerView:
    def consumer() -> ConsumerView:
        [view] = daemon.client.call(JOB_SHOW, JobName(job="train")).consumers
        return view

    return until(consumer, "the consumer is right", is_right=is_right)


def wait_for_files(daemon: Daemon, is_right: Callable[[set[str]], bool]) -> None:
    until(lambda: {path.name for path in (daemon.home / "state/jobs").glob("*")}, is_right=is_right)


def test_a_job_goes_on_where_it_was_when_the_daemon_was_killed(tmp_path: Path) -> None:
    names = write_files(tmp_path / "origin", FILES, SIZE)
    order = np.random.default_rng(6).permutation(FILES).astype("<u4")
    with Daemon(tmp_path / "node", SMALL) as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        paths = [name.encode() for name in reversed(names)]
        publish(daemon, map=SampleMap(kind="files", paths=paths), pid=os.getpid())
        for epoch in range(2):
            daemon.client.call(JOB_EPOCH, JobEpoch(job="train", consumer="0", epoch=epoch, order=order.tobytes()))
        with mounted(daemon.socket, "images", tmp_path / "mnt", "no_push") as mount:

            def read(samples: Any) -> None:
                for sample in samples:
                    path = mount / os.fsdecode(paths[sample])
                    assert path.read_bytes().startswith(paths[sample])
                    time.sleep(0.003)

            read(order[:200])
            before = wait_for(daemon, lambda view: view.position >= 195)
            assert before.state == "following"
            time.sleep(1.5)
            daemon.kill9()
            daemon.start()
            view = wait_for(daemon, lambda view: view.epoch_length > 0)
            assert (view.state, view.epoch, view.known_epochs) == ("following", 0, [0, 1])
            assert 195 <= view.position <= 200
            read(order[200:])
            end = wait_for(daemon, lambda view: view.epoch == 1 or view.position >= FILES - 5)
            assert end.mismatched < 20
            fetched = daemon.status().fetched_blocks
            [shown] = daemon.client.call(JOB_LIST, Empty()).jobs
            # Of 300 reads nearly all found their block here: without a plan, all but what fitted would have waited.
            assert fetched >= 200
            assert shown.stalls < 60


def test_a_sampler_spec_goes_on_too_and_publishing_it_again_changes_nothing(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 50, 10)
    spec = SamplerSpec(kind="torch-distributed", size=50, seed=3, epochs=9)
    with Daemon(tmp_path / "node") as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        started = publish(daemon, spec=spec).started
        wait_for(daemon, lambda view: view.epoch_length > 0)
        daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=4, position=7))
        wait_for(daemon, lambda view: (view.epoch, view.position) == (4, 7))
        time.sleep(1.5)
        for stop in (daemon.kill9, daemon.stop):
            stop()
            daemon.start()
            view = wait_for(daemon, lambda view: view.epoch_length > 0)
            assert (view.state, view.epoch, view.position, view.known_epochs) == ("following", 4, 7, [4, 5, 6, 7, 8])
            again = publish(daemon, spec=spec)
            assert again.started == started
            wait_for(daemon, lambda view: (view.epoch, view.position) == (4, 7))
        daemon.client.call(JOB_CANCEL, JobName(job="train"))
        wait_for_files(daemon, lambda found: not found)
        daemon.kill9()
        daemon.start()
        assert jobs(daemon) == []


def test_who_is_gone_is_forgotten(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 5, 10)
    with Daemon(tmp_path / "node") as daemon, subprocess.Popen(["sleep", "1000"]) as process:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        publish(daemon, "gone", pid=process.pid)
        publish(daemon, "gone", pid=process.pid, consumer="1")
        publish(daemon, "here", pid=os.getpid())
        publish(daemon, "here", pid=process.pid, consumer="1")
        publish(daemon, "leased", pid=0, lease=5)
        wait_for_files(daemon, lambda found: len(found) >= 3)
        time.sleep(1)
        daemon.kill9()
        process.kill()
        process.wait()
        daemon.start()
        assert jobs(daemon) == ["here", "leased"]
        [consumer] = daemon.client.call(JOB_SHOW, JobName(job="here")).consumers
        assert consumer.consumer == "0"
        assert "has ended" in daemon.log.read_text()
        wait_for_files(daemon, lambda found: not any(name.startswith("gone") for name in found))
        until(lambda: daemon.client.call(JOB_SHOW, JobName(job="leased")).state != "running")
