"""One run of `cachefs-bench train`: training jobs read through the mount of a new, empty node with a slow origin."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from cachefs_tools.training_loop import read_report

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobName, JobView
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST, STALL_LIST
from cachefs_bench.job_process import run_job_process
from cachefs_bench.node_timeline import record_node
from cachefs_bench.origin_server import OriginServer
from cachefs_bench.scenario import Scenario
from cachefs_bench.training_figures import JobResult, run_document, view_document
from cachefs_bench.training_node import TrainingNode, run_training_node

# Seconds after which jobs count as hung: more than a job takes even if the origin delivers one file at a time.
TIMEOUT_SECONDS: Final = 1800.0


def run_scenario(scenario: Scenario, server: OriginServer, work: Path) -> dict[str, Any]:
    """Make one run. Returns its results as a JSON-serialisable document. *work* is an empty directory. Raises
    CachefsError if a job fails."""
    try:
        with run_training_node(work, server, scenario) as node:
            with record_node(node) as timeline:
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
    """Run all jobs. Returns their results, and the daemon's views of them shortly before they ended."""
    begin = time.monotonic()
    views: dict[str, JobView] = {}
    with ExitStack() as stack:
        running = []
        for number, job in enumerate(scenario.jobs):
            time.sleep(max(0.0, begin + job.start - time.monotonic()))
            running.append(stack.enter_context(run_job_process(scenario, job, node, work / f"job{number}")))
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
