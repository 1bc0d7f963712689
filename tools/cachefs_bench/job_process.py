"""One job of `cachefs-bench`: a process that reads through a mount, and publishes its reads if told to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cachefs.job_messages import JobPublication, SampleMap
from cachefs.rpc import JOB_PUBLISH, DaemonClient
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_bench.lab.scratch_node import DATASET
from cachefs_bench.scenario import JobLoader, Publishing, Scenario, SpecFault, TrainingJob
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill


class JobNode(Protocol):
    """The attributes of a node that a job needs."""

    @property
    def client(self) -> DaemonClient:
        """Client of the daemon."""

    @property
    def socket(self) -> Path:
        """Path of the daemon's socket."""

    @property
    def mountpoint(self) -> Path:
        """Mount point of the dataset."""


@contextmanager
def run_job_process(
    scenario: Scenario, job: TrainingJob, node: JobNode, name: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the job's process, after publishing if the scenario asks for it. The process and its workers are stopped at
    the end. The job's files are *name* with a suffix."""
    with name.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            _command(scenario, job, node, name), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, SOCKET_VARIABLE: str(node.socket)},
        )  # fmt: skip
    try:
        if scenario.publishing == Publishing.SPEC:
            node.client.call(JOB_PUBLISH, _publication(scenario, job, name.name, process.pid))
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        wait_or_kill(process)


def _command(scenario: Scenario, job: TrainingJob, node: JobNode, name: Path) -> list[str]:
    shape = scenario.shape
    script = "torch_job" if scenario.loader == JobLoader.TORCH else "plain_job"
    hooked = scenario.publishing == Publishing.RUN
    front = [str(Path(sys.executable).with_name("cachefs")), "run", "--"] if hooked else []
    return [
        *KILL_WITH_PARENT, *front, sys.executable, "-m", f"cachefs_bench.{script}", str(node.mountpoint),
        "--report", str(name.with_suffix(".jsonl")), "--epochs", str(shape.epochs),
        "--batch-size", str(shape.batch_size), "--workers", str(shape.workers), "--prefetch", str(shape.prefetch),
        "--seed", str(job.seed), "--demand", str(shape.demand),
        "--batches", str(job.batches), *(["--keep-pages"] if scenario.keep_pages else []),
    ]  # fmt: skip


def _publication(scenario: Scenario, job: TrainingJob, name: str, pid: int) -> JobPublication:
    """Return the job's publication, with its lie."""
    shape = scenario.shape
    spec = scenario.real_sampler_spec(job)
    if job.lie == SpecFault.SEED:
        spec = replace(spec, seed=job.seed + 1000)
    elif job.lie == SpecFault.HALF:
        spec = replace(spec, size=shape.files // 2)
    elif job.lie == SpecFault.RANGE:
        spec = replace(spec, size=2 * shape.files)
    return JobPublication(
        job=name, dataset=DATASET, spec=spec, map=SampleMap(kind="tree"), workers=shape.workers,
        batch_size=shape.batch_size, prefetch=shape.prefetch, pid=pid, source="cachefs-bench",
    )  # fmt: skip
