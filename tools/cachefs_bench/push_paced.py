"""Measures the latency of open + read + close of a sample while a job computes between samples, next to a native copy.

In one run the job sends no progress, so the node detects it by tripwires. In the other, ten heartbeats per second tell
it.

`watch_pages` measures the bytes of files in the kernel's page cache meanwhile.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cachefs.errors import CachefsError, NotFound
from cachefs.job_messages import JobProgress, JobPublication, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_PROGRESS
from cachefs_bench.lab.scratch_node import DATASET, ScratchNode
from cachefs_bench.push_node import (
    PushMode,
    measure_processor_time,
    mount_cold,
    mount_options,
    publish_job,
    push_figures,
    run_push_node,
    tier_budget,
)
from cachefs_bench.push_reader import PROGRESS
from cachefs_bench.sample_data import sample_name, write_samples
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill
from cachefs_tools.kernel_pages import load_pages_interleaved
from cachefs_tools.kernel_pages import resident_bytes as resident_bytes

PERIOD_SECONDS: Final = 1.0
SEED: Final = 1
HEARTBEATS_PER_SECOND: Final = 10
# Seconds after which a reader counts as hung.
TIMEOUT_SECONDS: Final = 600.0


@contextmanager
def watch_pages(paths: Sequence[Path]) -> Iterator[list[int]]:
    """Measure the resident bytes of the files when the block begins, once a second while it runs, and when it ends."""
    samples = [resident_bytes(paths)]
    over = threading.Event()

    def watch() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            samples.append(resident_bytes(paths))
            due += PERIOD_SECONDS

    thread = threading.Thread(target=watch, name="resident-pages")
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
    samples.append(resident_bytes(paths))


@dataclass(frozen=True, slots=True)
class PacedLoad:
    """The dataset, and how the job reads it."""

    files: int
    size: int  # bytes of each file
    tier: str  # where the dataset is: `memory` or `ssd`
    epochs: int
    compute: float  # seconds per sample
    head_start: float  # seconds from publishing to the first read
    budget: str = ""  # of the page cache, as the mount option takes it; empty: the mount's default
    watch_pages: bool = False  # measure once a second how much of the mount is in the page cache


def measure(work: Path, load: PacedLoad) -> list[dict[str, Any]]:
    """Run once without heartbeats and once with them, each on a new mount of one node that holds the dataset."""
    source = work / "native"
    write_samples(source, load.files, load.size)
    with run_push_node(work, source, load.tier, tier_budget(load.files, load.size)) as node:
        return [_run(node, source, load, heartbeats) for heartbeats in (False, True)]


def _run(node: ScratchNode, source: Path, load: PacedLoad, heartbeats: bool) -> dict[str, Any]:
    title = "heartbeats" if heartbeats else "tripwires"
    names = [sample_name(number) for number in range(load.files)]
    load_pages_interleaved((source,), names)
    with ExitStack() as stack:
        mount = stack.enter_context(mount_cold(node, mount_options(PushMode.PUSHING, load.budget)))
        paths = [mount.path / name for name in names]
        progress = node.directory / f"{title}.progress"
        progress.write_bytes(bytes(PROGRESS.size))
        reader = stack.enter_context(_run_reader(mount.path, source, load, progress))
        before = mount.settled_counters()
        seconds = stack.enter_context(ExitStack())
        processor = seconds.enter_context(measure_processor_time(*mount.process_ids()))
        resident = seconds.enter_context(watch_pages(paths)) if load.watch_pages else []
        stack.enter_context(publish_job(node, _publication(title, load, reader.pid)))
        if heartbeats:
            stack.enter_context(_send_heartbeats(node, title, progress))
        time.sleep(load.head_start)
        epochs = _epochs(reader, title)
        seconds.close()
        after = mount.settled_counters()
    return {"run": title, **_epoch_figures(load, epochs), **_requests(load, before, after),
            **_residency(resident, after), "push": push_figures(before, after),
            "processor_seconds": processor}  # fmt: skip


@contextmanager
def _run_reader(mount: Path, native: Path, load: PacedLoad, progress: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the reader, which waits for a line before it reads; it is stopped at the end."""
    command = [
        *KILL_WITH_PARENT, sys.executable, "-m", "cachefs_bench.push_reader", str(mount), str(native),
        "--files", str(load.files), "--size", str(load.size), "--seed", str(SEED), "--epochs", str(load.epochs),
        "--compute", str(load.compute), "--progress", str(progress),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        wait_or_kill(process)


def _publication(title: str, load: PacedLoad, pid: int) -> JobPublication:
    spec = SamplerSpec(kind="numpy", size=load.files, seed=SEED, epochs=load.epochs)
    return JobPublication(
        job=title, dataset=DATASET, spec=spec, map=SampleMap(kind="tree"), pid=pid, source="cachefs-bench"
    )


@contextmanager
def _send_heartbeats(node: ScratchNode, job: str, progress: Path) -> Iterator[None]:
    """Send the reader's progress, from the file *progress*, to the daemon ten times a second."""
    over = threading.Event()

    def send_heartbeat() -> None:
        while not over.wait(1 / HEARTBEATS_PER_SECOND):
            epoch, position = PROGRESS.unpack(progress.read_bytes())
            # The job ends with its reader.
            with suppress(NotFound):
                node.client.call(JOB_PROGRESS, JobProgress(job=job, consumer="0", epoch=epoch, position=position))

    thread = threading.Thread(target=send_heartbeat, name="heartbeats")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _epochs(reader: subprocess.Popen[bytes], title: str) -> list[dict[str, Any]]:
    """Start the reader and wait for its end. Returns its document of each epoch."""
    try:
        output, errors = reader.communicate(b"go\n", timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise CachefsError(f"{title}: the reader has not ended after {TIMEOUT_SECONDS:.0f} s") from None
    if reader.returncode:
        raise CachefsError(f"{title}: the reader failed: {errors.decode(errors='replace')[-2000:].strip()}")
    return [json.loads(line) for line in output.splitlines()]


def _epoch_figures(load: PacedLoad, epochs: list[dict[str, Any]]) -> dict[str, Any]:
    for epoch in epochs:
        compute, mount, native = load.compute * epoch["samples"], epoch["mount"], epoch["native"]
        epoch["utilisation"] = round(compute / (compute + mount["seconds"]), 4)
        epoch["ratio"] = {name: round(mount[name] / native[name], 3) for name in ("p50_us", "p99_us")}
    return {"samples": sum(epoch["samples"] for epoch in epochs), "epochs": epochs}


def _requests(load: PacedLoad, before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    samples = load.files * load.epochs
    names = ("requests", "read", "hits_memory", "hits_ssd", "misses")
    made = {name: after[name] - before[name] for name in names}
    return {"fuse_requests_per_sample": made["requests"] / samples, "fuse": made}


def _residency(resident: list[int], after: dict[str, int]) -> dict[str, Any]:
    """Return the bytes in the page cache; empty if not measured."""
    if not resident:
        return {}
    budget = after.get("push_budget", 0)
    share = round(max(resident) / budget, 3) if budget else None
    return {"resident": {"largest_bytes": max(resident), "budget": budget, "of_budget": share, "samples": resident}}
