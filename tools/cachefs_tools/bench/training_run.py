"""One run of `cachefs-bench train`: training jobs read through the mount of a new, empty node whose origin is slow."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobName, JobPublish, JobView, SampleMap
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST, JOB_PUBLISH, STALL_LIST
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_tools.bench.directory_node import DATASET
from cachefs_tools.bench.origin_server import OriginServer
from cachefs_tools.bench.scenario import Lie, Loader, Publishing, Scenario, TrainingJob
from cachefs_tools.bench.timeline import recorded
from cachefs_tools.bench.training_figures import JobResult, run_document, view_document
from cachefs_tools.bench.training_loop import read_report
from cachefs_tools.bench.training_node import TrainingNode, training_node
from cachefs_tools.scratch_node import WITH_PARENT, wait

# Jobs that have not ended after this time hang. It is more than a job takes even if the origin delivers one file at a
# time.
TIMEOUT_SECONDS: Final = 1800.0


def run(scenario: Scenario, server: OriginServer, work: Path) -> dict[str, Any]:
    """Do one run. Returns what it measured, as a JSON-serialisable document.

    *work* is an empty directory. Raises CachefsError where a job fails.
    """
    try:
        with training_node(work, server, scenario) as node:
            with recorded(node) as timeline:
                results, views = _run_jobs(scenario, node, work)
            stalls = node.client.call(STALL_LIST, JobName(job="")).rows
            document = run_document(scenario, node.capacity, results, timeline)
    except DaemonUnavailable as error:
        last_words = (work / "cachefsd.log").read_text(errors="replace")[-1000:].strip()
        raise CachefsError(f"{scenario.title}: {error}; the daemon's log ends: {last_words}") from None
    document["stalls"] = msgspec.to_builtins(stalls)
    document["job_views"] = [view_document(view) for view in views]
    return document


def _run_jobs(scenario: Scenario, node: TrainingNode, work: Path) -> tuple[list[JobResult], list[JobView]]:
    """Run all jobs. Returns their results, and what the daemon said about them shortly before they ended."""
    begin = time.monotonic()
    views: dict[str, JobView] = {}
    with ExitStack() as stack:
        running = []
        for number, job in enumerate(scenario.jobs):
            time.sleep(max(0.0, begin + job.start - time.monotonic()))
            running.append(stack.enter_context(_started(scenario, job, node, work / f"job{number}")))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(process.poll() is None for process in running):
            views.update((view.job, view) for view in node.client.call(JOB_LIST, Empty()).jobs)
            if time.monotonic() > deadline:
                raise CachefsError(f"{scenario.title}: a job did not end within {TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.5)
        for number, process in enumerate(running):
            if process.returncode:
                said = (work / f"job{number}.log").read_text(errors="replace")[-2000:].strip()
                raise CachefsError(f"{scenario.title}: job {number} failed: {said}")
    results = [JobResult(job, read_report(work / f"job{number}.jsonl")) for number, job in enumerate(scenario.jobs)]
    return results, list(views.values())


@contextmanager
def _started(scenario: Scenario, job: TrainingJob, node: TrainingNode, name: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job's process, running; it has published where it should. It and its workers are stopped in the end.

    The files of the job are *name* with a suffix.
    """
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
        wait(process)


def _command(scenario: Scenario, job: TrainingJob, node: TrainingNode, name: Path) -> list[str]:
    shape = scenario.shape
    script = "torch_job" if scenario.loader == Loader.TORCH else "plain_job"
    hooked = scenario.publishing == Publishing.RUN
    front = [str(Path(sys.executable).with_name("cachefs")), "run", "--"] if hooked else []
    return [
        *WITH_PARENT, *front, sys.executable, "-m", f"cachefs_tools.bench.{script}", str(node.mountpoint),
        "--report", str(name.with_suffix(".jsonl")), "--epochs", str(shape.epochs),
        "--batch-size", str(shape.batch_size), "--workers", str(shape.workers), "--prefetch", str(shape.prefetch),
        "--seed", str(job.seed), "--demand", str(shape.demand),
        "--batches", str(job.batches), *(["--keep-pages"] if scenario.keep_pages else []),
    ]  # fmt: skip


def _publication(scenario: Scenario, job: TrainingJob, name: str, pid: int) -> JobPublish:
    """What the job says about itself, with the lie that it is to tell."""
    shape = scenario.shape
    spec = scenario.sampler_spec(job)
    if job.lie == Lie.SEED:
        spec = replace(spec, seed=job.seed + 1000)
    elif job.lie == Lie.HALF:
        spec = replace(spec, size=shape.files // 2)
    elif job.lie == Lie.RANGE:
        spec = replace(spec, size=2 * shape.files)
    return JobPublish(
        job=name, dataset=DATASET, spec=spec, map=SampleMap(kind="tree"), workers=shape.workers,
        batch_size=shape.batch_size, prefetch=shape.prefetch, pid=pid, source="cachefs-bench",
    )  # fmt: skip
