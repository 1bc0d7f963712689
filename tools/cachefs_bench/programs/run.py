"""Runs a program: on the local disk, or on the mount of a node with new tiers and a slow origin.

`SequenceWatch` polls published sequences and the origin's counters while the program runs.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName, JobView
from cachefs.messages import Empty, OriginOptions
from cachefs.rpc import JOB_LIST, STALL_LIST, DaemonClient
from cachefs_bench.lab.scratch_node import (
    DATASET,
    SCRATCH_CREDENTIALS,
    NodeSettings,
    TierSettings,
    list_dataset,
    memory_directory,
    run_daemon,
)
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.programs.catalogue import Program
from cachefs_bench.programs.figures import ProgramEpoch, ProgramOutcome, PublishedSequences, RunMode
from cachefs_tools.child_programs import KILL_WITH_PARENT, mount_dataset, program_path

BUDGET: Final = 1 << 30
SEGMENT_SIZE: Final = 64 << 20
# A program that takes longer counts as hung.
TIMEOUT_SECONDS: Final = 600.0
# Seconds between queries of what is published.
POLL_SECONDS: Final = 0.1


class SequenceWatch:
    """Records which epochs of which consumers were ever known. The daemon forgets past epochs."""

    def __init__(self, client: DaemonClient, origin_bytes: Callable[[], int]) -> None:
        self._client, self._origin_bytes = client, origin_bytes
        self._origin_samples: list[tuple[float, int]] = []  # time and bytes from the origin until then
        self._known: dict[str, dict[int, float]] = {}
        self._problems: dict[str, None] = {}

    def poll_daemon(self) -> None:
        """Query the daemon. Raises CachefsError if it does not answer."""
        came, now = self._origin_bytes(), time.monotonic()
        self._origin_samples.append((now, came))
        for view in self._client.call(JOB_LIST, Empty()).jobs:
            self.record_view(view, now)

    def record_view(self, view: JobView, now: float) -> None:
        """Record a view of a job."""
        for consumer in view.consumers:
            known = self._known.setdefault(consumer.consumer, {})
            for epoch in consumer.known_epochs:
                known.setdefault(epoch, now)
            if consumer.problem:
                self._problems[consumer.problem] = None

    def first_bytes(self, epochs: Sequence[ProgramEpoch]) -> int:
        """Return the bytes from the origin in the first epoch until its first samples, between the first and the last
        query in that time."""
        sizes = [size for seen, size in self._origin_samples if epochs and epochs[0].begin <= seen <= epochs[0].first]
        return sizes[-1] - sizes[0] if sizes else 0

    def published(self) -> PublishedSequences:
        """Return the records so far."""
        return PublishedSequences(self._known, tuple(self._problems))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings shared by all runs of a measurement."""

    python: str  # the interpreter of the programs
    scripts: Path  # tests/programs
    epochs: int
    seed: int
    limits: LinkLimits
    options: tuple[str, ...] = ()  # arguments for all programs


@dataclass(frozen=True, slots=True)
class ProgramNode:
    """A node with a mounted dataset."""

    client: DaemonClient
    socket: Path
    mountpoint: Path
    throttle: Throttle  # in front of its origin


@contextmanager
def run_mounted_node(limits: LinkLimits, server: str, bucket: str, work: Path, *, guess: bool) -> Iterator[ProgramNode]:
    """Run a new node with empty tiers that can hold everything. Its origin is a bucket of the S3 server behind the
    limits.

    guess: whether it reads ahead for programs that publish nothing.
    """
    mountpoint = work / "mnt"
    settings = NodeSettings(TierSettings(BUDGET, SEGMENT_SIZE), TierSettings(0), guess=guess)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_directory("cachefs-bench-"))
        throttle = stack.enter_context(run_throttle(server, LinkLimits(), work / "throttle.log"))
        node = stack.enter_context(run_daemon(work, memory, settings, SCRATCH_CREDENTIALS))
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        list_dataset(node.client, f"s3://{bucket}", options)
        stack.enter_context(mount_dataset(DATASET, mountpoint, node.socket, work / "mount.log"))
        throttle.set_limits(limits)
        yield ProgramNode(node.client, node.socket, mountpoint, throttle)


def run_native(setting: RunSettings, one: Program, data: Path, work: Path) -> ProgramOutcome:
    """Run a program on the local disk. Raises CachefsError if the program fails."""
    document, wall, lines = _run_to_end(_command(setting, one, data), work, lambda: None)
    return ProgramOutcome(
        RunMode.NATIVE, document["digest"], tuple(ProgramEpoch(**epoch) for epoch in document["epochs"]), wall, lines
    )


def run_on(node: ProgramNode, setting: RunSettings, one: Program, mode: RunMode, work: Path) -> ProgramOutcome:
    """Run a program on the node's mount. Raises CachefsError if the program fails."""
    command = _command(setting, one, node.mountpoint)
    if mode is RunMode.RUN:
        # Processes of a job share what they learn, so another benchmark's job must have another name.
        command = [
            program_path("cachefs"),
            "run",
            "--job",
            f"{one.name}-{os.getpid()}",
            "--socket",
            str(node.socket),
            "--",
            *command,
        ]
    before, stalled = node.throttle.read_counters().bytes, _stall_seconds(node.client)
    watch = SequenceWatch(node.client, lambda: node.throttle.read_counters().bytes - before)
    document, wall, lines = _run_to_end(command, work, watch.poll_daemon)
    epochs = tuple(ProgramEpoch(**epoch) for epoch in document["epochs"])
    return ProgramOutcome(
        mode, document["digest"], epochs, wall, lines, node.throttle.read_counters().bytes - before,
        _stall_seconds(node.client) - stalled, watch.published(), watch.first_bytes(epochs),
    )  # fmt: skip


def _stall_seconds(client: DaemonClient) -> float:
    """Return the seconds that reads of the node have waited so far. The mount reports them within a second or two."""
    return sum(row.seconds for row in client.call(STALL_LIST, JobName(job="")).rows)


def _command(setting: RunSettings, one: Program, data: Path) -> list[str]:
    script = setting.scripts / f"{one.script}.py"
    common = ("--seed", str(setting.seed), "--epochs", str(setting.epochs))
    return [setting.python, str(script), str(data), *common, *one.options, *setting.options]


def _run_to_end(
    command: Sequence[str], work: Path, look: Callable[[], None]
) -> tuple[dict[str, Any], float, tuple[str, ...]]:
    """Run the program to its end. Returns its result line, its seconds, and cachefs's lines."""
    output, errors = work / "program.out", work / "program.err"
    began = time.monotonic()
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [*KILL_WITH_PARENT, *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=work,
            env=_environment(work), start_new_session=True,
        )  # fmt: skip
    try:
        while process.poll() is None:
            if time.monotonic() - began > TIMEOUT_SECONDS:
                raise CachefsError(f"{command[-1]} did not end within {TIMEOUT_SECONDS:.0f} s")
            look()
            _wait(process, POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    wall = time.monotonic() - began
    log = errors.read_text(errors="replace")
    if process.returncode:
        raise CachefsError(f"{' '.join(command)} failed: {log[-2000:].strip()}")
    document: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return document, wall, tuple(line for line in log.splitlines() if is_complaint(line))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _environment(work: Path) -> dict[str, str]:
    """Return an environment in which libraries cache in the run's own directory and work offline."""
    cache = str(work / "cache")
    return {
        **os.environ, "HF_HOME": cache, "XDG_CACHE_HOME": cache, "YOLO_CONFIG_DIR": cache, "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "", "USE_TF": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def is_complaint(line: str) -> bool:
    """Return whether a line reports a problem of cachefs or an unknown loader; all such lines have this text."""
    return line.startswith("cachefs:") and "the job continues" in line
