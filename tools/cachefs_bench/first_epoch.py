"""Compares the first epoch of a published job that reads at full speed with a parallel download of the same keys."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from cachefs.errors import CachefsError
from cachefs_bench import block_budget
from cachefs_bench.block_budget import BlockCase
from cachefs_bench.job_process import run_job_process
from cachefs_bench.lab.scratch_node import memory_directory
from cachefs_bench.origin_server import BUCKET, OriginServer, run_filled_server
from cachefs_bench.scenario import DatasetShape, JobLoader, Publishing, Scenario, TrainingJob
from cachefs_tools.training_loop import read_report

# Concurrent downloads: as many as the daemon has connections for reading ahead.
PARALLEL: Final = 48
# Seconds after which a reader or a download counts as hung.
_TIMEOUT_SECONDS: Final = 900.0


def measure(work: Path, endpoint: str | None, shape: DatasetShape, turns: int) -> dict[str, Any]:
    """Measure in turns an epoch through a new mount of an empty node, and a download into an empty directory, both in
    memory. endpoint: of a running S3 server; None: rclone's is started."""
    found: list[dict[str, float]] = []
    (case, *_) = block_budget.cases(shape)
    click.echo(f"writing {shape.files:,} files of {shape.size:,} bytes ...", err=True)
    with run_filled_server(work, shape, endpoint) as server:
        for turn in range(turns):
            click.echo(f"turn {turn + 1} of {turns}: an epoch through a mount ...", err=True)
            directory = work / f"turn{turn}"
            directory.mkdir()
            read = _run_epoch(directory, server, shape, case)
            click.echo(f"turn {turn + 1} of {turns}: a download ...", err=True)
            got = _download(server, shape)
            found.append({"samples_per_s": round(read, 1), "download_per_s": round(got, 1)})
    ratio = statistics.median(one["samples_per_s"] / one["download_per_s"] for one in found)
    return {"files": shape.files, "bytes": shape.size, "turns": found, "to_download": round(ratio, 3)}


def _run_epoch(work: Path, server: OriginServer, shape: DatasetShape, case: BlockCase) -> float:
    """Return the samples per second of the epoch. Raises CachefsError if some are wrong."""
    scenario = Scenario("first epoch", JobLoader.PLAIN, Publishing.SPEC, shape=shape, keep_pages=True)
    name = work / "job"
    with (
        block_budget.run_fetching_node(work, server, case) as node,
        run_job_process(scenario, TrainingJob(), node, name) as job,
    ):
        try:
            failed = job.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise CachefsError(f"the reader did not end within {_TIMEOUT_SECONDS:.0f} s") from None
    if failed:
        raise CachefsError(f"the reader failed: {name.with_suffix('.log').read_text(errors='replace')[-500:].strip()}")
    (epoch,) = read_report(name.with_suffix(".jsonl"))
    if epoch.damaged or epoch.samples != shape.files:
        raise CachefsError(f"of {shape.files} samples, {epoch.samples} came, and {epoch.damaged} of them were wrong")
    return epoch.samples / (epoch.end - epoch.begin)


def _download(server: OriginServer, shape: DatasetShape) -> float:
    """Return the files per second of `rclone copy`. Raises CachefsError if it fails."""
    command = [
        str(Path(sys.executable).with_name("rclone")), "copy", f":s3:{BUCKET}",
        "--config", "/dev/null", "--transfers", str(PARALLEL), "--checkers", "8",
        "--s3-provider", "Other", "--s3-endpoint", server.endpoint, "--s3-env-auth",
    ]  # fmt: skip
    credentials = {
        "AWS_ACCESS_KEY_ID": server.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": server.credentials.secret_key,
    }
    with memory_directory("cachefs-bench-") as directory:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [*command, str(directory)], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS,
                env={**os.environ, **credentials},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CachefsError(f"rclone copy did not end within {_TIMEOUT_SECONDS:.0f} s") from None
        took = time.monotonic() - began
        if done.returncode:
            raise CachefsError(f"rclone copy failed: {done.stderr.strip()[-500:]}")
        files = sum(len(names) for _, _, names in os.walk(directory))
        shutil.rmtree(directory, ignore_errors=True)
    if files != shape.files:
        raise CachefsError(f"rclone copy has brought {files} of {shape.files} files")
    return files / took
