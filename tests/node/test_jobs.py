"""Jobs: publishing, leases, progress, prefetch and stalls, on a real daemon."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from cachefs.errors import ConfigError, NotFound
from cachefs.job_messages import JobEpoch, JobName, JobProgress, JobPublish, JobView, SamplerSpec
from cachefs.messages import Empty
from cachefs.rpc import JOB_CANCEL, JOB_EPOCH, JOB_LIST, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW
from tests.daemon import Daemon


def write_files(directory: Path, count: int, size: int = 20_000) -> None:
    directory.mkdir()
    for number in range(count):
        (directory / f"{number:05d}").write_bytes(np.random.default_rng(number).bytes(size))


def wait_for_state(daemon: Daemon, job: str, state: str) -> JobView:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        view = daemon.client.call(JOB_SHOW, JobName(job=job))
        if view.state == state:
            return view
        time.sleep(0.05)
    raise AssertionError(f"job {job} does not become {state}: {view}")


def test_a_job_is_published_shown_and_cancelled(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 10)
    with Daemon(tmp_path / "node") as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        spec = SamplerSpec(kind="sequential", size=10, epochs=3)
        view = daemon.client.call(JOB_PUBLISH, JobPublish(job="train", dataset="images", spec=spec, source="test"))
        assert (view.job, view.dataset, view.source, view.state) == ("train", "images", "test", "running")
        assert [(one.consumer, one.known_epochs) for one in view.consumers] == [("0", [0, 1, 2])]
        assert [job.job for job in daemon.client.call(JOB_LIST, Empty()).jobs] == ["train"]
        daemon.client.call(JOB_CANCEL, JobName(job="train"))
        assert daemon.client.call(JOB_SHOW, JobName(job="train")).state == "cancelled"
        with pytest.raises(NotFound, match="publish first"):
            daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=1))


def test_bad_publications_are_refused_with_a_reason(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 1)
    with Daemon(tmp_path / "node") as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")

        def publish(**fields: object) -> None:
            daemon.client.call(JOB_PUBLISH, JobPublish(**{"job": "train", "dataset": "images", **fields}))  # type: ignore[arg-type]

        with pytest.raises(NotFound, match="no dataset named 'videos'"):
            publish(dataset="videos")
        with pytest.raises(NotFound, match="has no snapshot abc"):
            publish(snapshot="abc")
        with pytest.raises(ConfigError, match="sampler 'sorted': expected one of sequential"):
            publish(spec=SamplerSpec(kind="sorted", size=1))
        with pytest.raises(ConfigError, match="rank 2 is not below"):
            publish(spec=SamplerSpec(kind="torch-distributed", size=1, replicas=2, rank=2))
        with pytest.raises(ConfigError, match="cannot name a job"):
            publish(job="../x")
        with pytest.raises(NotFound, match="no job named 'train'"):
            daemon.client.call(JOB_EPOCH, JobEpoch(job="train", consumer="0", epoch=0, order=b""))
        assert daemon.client.call(JOB_LIST, Empty()).jobs == []


def test_a_job_ends_with_its_process_or_its_lease(tmp_path: Path) -> None:
    write_files(tmp_path / "origin", 1)
    with Daemon(tmp_path / "node") as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        process = subprocess.Popen(["sleep", "60"])
        try:
            for job, pid, lease in (("dies", process.pid, 0.1), ("lapses", 0, 0.1), ("lives", os.getpid(), 0.1)):
                daemon.client.call(JOB_PUBLISH, JobPublish(job=job, dataset="images", pid=pid, lease=lease))
            assert "no sign of life" in wait_for_state(daemon, "lapses", "ended").problems[0]
            assert daemon.client.call(JOB_SHOW, JobName(job="dies")).state == "running"
        finally:
            process.kill()
            process.wait()
        assert f"process {process.pid} is gone" in wait_for_state(daemon, "dies", "ended").problems[0]
        assert daemon.client.call(JOB_SHOW, JobName(job="lives")).state == "running"
