"""Runs the job of a trial, and reads its report."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.publishing.channel import JOB_VARIABLE
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill
from cachefs_tools.training_loop import EpochReport, read_report
from cachefs_tools.trial.extent import FileChoice, TrialJob

_SLOWER: Final = 5.0
_START_SECONDS: Final = 90.0


class TrialEpoch(msgspec.Struct, frozen=True):
    """The job's results of an epoch."""

    samples: int
    seconds: float
    # Seconds of waiting for data, including those before the first batch.
    waited: float
    # Seconds before its first batch.
    first_batch: float
    # Seconds of a sample's read.
    read_p50: float
    read_p99: float

    @property
    def waiting_share(self) -> float:
        """Share of time spent waiting, without the first batch, for which a long job waits only once."""
        return max(0.0, self.waited - self.first_batch) / max(1e-9, self.seconds - self.first_batch)


@dataclass(frozen=True, slots=True)
class TrialEnvironment:
    """The environment of a trial's job."""

    # The mount, and the daemon's socket.
    root: Path
    socket: Path
    # Name of the job.
    name: str
    # An empty directory.
    work: Path


def run_job(
    stage: TrialEnvironment, job: TrialJob, choice: FileChoice, progress: Callable[[int], None]
) -> list[TrialEpoch]:
    """Run the job. progress: called with the number of samples of the epoch. Raises CachefsError if the job fails, or
    takes far too long."""
    report = stage.work / "report"
    parameters = {
        "root": os.fsdecode(stage.root), "paths": [sample.path.hex() for sample in choice.samples], "rate": job.rate,
        "batch": job.batch, "workers": job.workers, "epochs": job.epochs, "report": os.fsdecode(report),
    }  # fmt: skip
    command = [*KILL_WITH_PARENT, sys.executable, "-P", "-m", "cachefs_tools.trial.job"]
    variables = {**os.environ, SOCKET_VARIABLE: str(stage.socket.absolute()), JOB_VARIABLE: stage.name}
    limit = _START_SECONDS + _SLOWER * job.epochs * max(1.0, len(choice.samples) / job.rate)
    with report.with_suffix(".err").open("w+b") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=variables, start_new_session=True
        )
        late = threading.Timer(limit, process.kill)
        try:
            late.start()
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin as pipe:
                pipe.write(json.dumps(parameters).encode())
            for line in process.stdout:
                progress(int(line))
            status = process.wait()
        finally:
            late.cancel()
            process.kill()
            wait_or_kill(process)
        if status:
            raise CachefsError(f"the job of the trial {_failure_reason(errors, status, limit)}")
    return [_summarize(epoch) for epoch in read_report(report)]


def _failure_reason(errors: IO[bytes], status: int, limit: float) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "no error output"
    return f"has not ended within {limit:.0f} s: {last}" if status < 0 else f"failed: {last}"


def _summarize(epoch: EpochReport) -> TrialEpoch:
    return TrialEpoch(
        epoch.samples, epoch.end - epoch.begin, sum(epoch.waits), epoch.waits[0] if epoch.waits else 0.0,
        epoch.read_p50, epoch.read_p99,
    )  # fmt: skip
