"""The plot of the demo: one training loop with four data sources, then a daemon that is killed in the middle of an
epoch.

`DaemonKill` kills the daemon, and restarts it at once, like systemd would. By then the tiers hold all blocks. Before
that epoch the kernel's pages are dropped, so that its reads need the tiers.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs_bench.demo.display import DemoDisplay
from cachefs_bench.demo.loaders import FolderSource
from cachefs_bench.demo.results import (
    DemoEpoch,
    DemoResult,
    DemoRun,
    KillEffect,
    LoopPosition,
    TrainedEpoch,
    longest_wait,
    require_equal_bytes,
)
from cachefs_bench.demo.settings import EPOCHS
from cachefs_bench.demo.stage import DemoStage, file_system_type
from cachefs_bench.lab.node import LabNode
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill
from cachefs_tools.kernel_pages import drop_pages

START_SECONDS: Final = 60.0
_INTERVAL: Final = 0.05
# Number of the epoch, and the share of it after which the daemon is killed.
KILL_EPOCH: Final = EPOCHS - 1
KILL_SHARE: Final = 0.5


@dataclass(slots=True)
class LoopReports:
    """The process's reports so far."""

    samples: int = -1  # number of samples found; -1: not ready
    positions: list[LoopPosition] = field(default_factory=list)
    epochs: list[TrainedEpoch] = field(default_factory=list)


class TrainingProcess:
    """A running training loop."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.reports = LoopReports()
        self._process = process
        self._log = log
        self._listener = threading.Thread(target=self._listen, name="demo-job", daemon=True)
        self._listener.start()

    def wait_ready(self, samples: int) -> None:
        """Wait until the loop has found its samples. Raises CachefsError if there are not *samples* of them."""
        self.wait_for(lambda: self.reports.samples >= 0, START_SECONDS)
        if self.reports.samples != samples:
            raise CachefsError(f"the training loop finds {self.reports.samples:,} samples, not {samples:,}")

    def begin_epoch(self) -> None:
        """Let the loop begin its next epoch."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `wait_for` reports why it has ended
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def position(self, epoch: int) -> LoopPosition:
        """Return the loop's position in its latest epoch."""
        positions = self.reports.positions
        return positions[-1] if positions and positions[-1].epoch == epoch else LoopPosition(epoch)

    def positions(self, epoch: int) -> list[LoopPosition]:
        """Return the positions after each batch of that epoch."""
        return [position for position in self.reports.positions if position.epoch == epoch]

    def wait_for(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition. Raises CachefsError if the loop fails or takes longer."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self._process.poll() is not None:
                self._listener.join(START_SECONDS)
                if reached():
                    return
                raise CachefsError(
                    f"the training loop ended with status {self._process.returncode}: {self._last_log_line()}"
                )
            if time.monotonic() > deadline:
                raise CachefsError(f"the training loop got no further within {seconds:.0f} s: {self._last_log_line()}")
            time.sleep(_INTERVAL)

    def stop(self) -> None:
        """End the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        wait_or_kill(self._process)
        self._listener.join(START_SECONDS)

    def _last_log_line(self) -> str:
        """Return the last line of its log: the error, if Python fails."""
        return (self._log.read_text(errors="replace").splitlines() or ["the log is empty"])[-1][:500]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            if "ready" in message:
                self.reports.samples = message["ready"]
            elif "at" in message:
                self.reports.positions.append(LoopPosition(**message["at"]))
            else:
                self.reports.epochs.append(TrainedEpoch(**message["epoch"]))


@contextmanager
def start_training(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[TrainingProcess]:
    """Run the command; it and its children are ended at the end. Its stderr goes to *log*."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*KILL_WITH_PARENT, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env,
            start_new_session=True,
        )  # fmt: skip
    try:
        job = TrainingProcess(process, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    try:
        yield job
    finally:
        job.stop()


class DaemonKill:
    """Kills and restarts the daemon in steps, from calls before and during epochs."""

    def __init__(self, node: LabNode, stage: DemoStage, display: DemoDisplay) -> None:
        self._node = node
        self._stage = stage
        self._display = display
        self._position: LoopPosition | None = None
        self._killed_at = 0.0  # time of the kill
        self._blocks_before = self._blocks_after = -1  # blocks in the tiers
        self._requests_before = 0  # to the store until the kill
        self._downtime = 0.0

    def prepare_epoch(self, epoch: int) -> None:
        """Prepare an epoch."""
        if epoch == KILL_EPOCH:
            self._display.show_step("dropping the kernel's pages, so that reads need the tiers")
            mounted = FolderSource(str(self._node.mountpoint))
            drop_pages(mounted.sample_path(name) for name in mounted.names)

    def do_next_step(self, job: TrainingProcess) -> None:
        """Do the next step if it is due. Call repeatedly during an epoch."""
        position = job.position(KILL_EPOCH)
        if self._position is None and position.samples >= KILL_SHARE * self._stage.settings.files:
            self._kill(position)
        elif (
            self._position is not None
            and self._blocks_after < 0
            and (self._node.socket.exists() or not self._node.is_running)
        ):
            self._note_restart()

    def effect(self, positions: Sequence[LoopPosition]) -> KillEffect:
        """Return the effect on the epoch with these positions. Raises CachefsError if the daemon does not come back."""
        if self._position is None:
            raise CachefsError("the epoch was over before the daemon could be killed; use more files")
        if self._blocks_after < 0:
            self._note_restart()
        requests = self._stage.store.read_counters().requests - self._requests_before
        return KillEffect(
            self._position,
            self._downtime,
            self._blocks_before,
            self._blocks_after,
            requests,
            longest_wait(positions, self._position),
        )

    def _kill(self, position: LoopPosition) -> None:
        self._blocks_before, self._requests_before = self._count_blocks(), self._stage.store.read_counters().requests
        pid = self._node.pid
        self._position, self._killed_at = position, time.monotonic()
        self._node.kill_daemon()
        self._node.start_daemon(self._stage.node_settings())
        self._display.show_step(
            f"cachefsd, process {pid}, gets SIGKILL at sample {position.samples:,}; another one starts"
        )

    def _note_restart(self) -> None:
        self._node.wait_ready()
        self._downtime = time.monotonic() - self._killed_at
        self._blocks_after = self._count_blocks()
        self._display.show_step(
            f"process {self._node.pid} answers after {self._downtime:.1f} s, with {self._blocks_after:,} blocks"
        )

    def _count_blocks(self) -> int:
        return sum(tier.blocks for tier in self._node.status().tiers)


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data source of the training loop."""

    name: str
    title: str
    explanation: str
    command: Sequence[str]
    node: LabNode | None = None


def run_demo(stage: DemoStage, display: DemoDisplay) -> DemoResult:
    """Make all runs, one after the other. Raises CachefsError if one fails, or reads other bytes than the others."""
    threads = f"{stage.settings.workers} thread{'s' if stage.settings.workers > 1 else ''}"
    direct = DataSource(
        "s3", "S3, no cachefs", f"one GET per sample, botocore (inside boto3), {threads}", stage.store_command()
    )
    runs = [_run(stage, display, direct)]
    with stage.run_node("mount", display) as node:
        mounted = DataSource(
            "mount", "cachefs mount", "plain files, nothing published", stage.training_command(node), node
        )
        runs.append(_run(stage, display, mounted))
    with stage.run_node("run", display) as node:
        explanation = "one line publishes the order of both epochs"
        published = DataSource("run", "cachefs run", explanation, stage.cachefs_run_command(node), node)
        runs.append(_run(stage, display, published))
    source = FolderSource(str(stage.local_dataset))
    drop_pages(source.sample_path(name) for name in source.names)
    local = DataSource(
        "local", "local disk", f"the same files on {file_system_type(stage.local_dataset)}", stage.training_command()
    )
    runs.append(_run(stage, display, local))
    killed, kill = _killed_run(stage, display)
    story = DemoResult(stage.settings.files, stage.total, runs, killed, kill)
    require_equal_bytes(story)
    return story


def _killed_run(stage: DemoStage, display: DemoDisplay) -> tuple[DemoRun, KillEffect]:
    """Run under `cachefs run` on a new node whose daemon is killed in the last epoch."""
    with stage.run_node("killed", display) as node:
        killing = DaemonKill(node, stage, display)
        source = DataSource(
            "killed", "cachefs run, killed", f"its daemon gets SIGKILL in the middle of epoch {KILL_EPOCH + 1}",
            stage.cachefs_run_command(node), node,
        )  # fmt: skip
        run = _run(stage, display, source, killing)
        return run, killing.effect(run.epochs[KILL_EPOCH].positions)


def _run(stage: DemoStage, display: DemoDisplay, source: DataSource, killing: DaemonKill | None = None) -> DemoRun:
    before = stage.store.read_counters()
    with start_training(source.command, stage.environment(source.node), stage.work / f"{source.name}.log") as job:
        with display.show_work("starting the loop"):
            job.wait_ready(stage.settings.files)
        listed = stage.store.read_counters()
        epochs = [_epoch(stage, display, job, source.title, killing) for _ in range(EPOCHS)]
    return DemoRun(source.name, source.title, source.explanation, epochs, listed.requests - before.requests)


def _epoch(
    stage: DemoStage, display: DemoDisplay, job: TrainingProcess, title: str, killing: DaemonKill | None
) -> DemoEpoch:
    number = len(job.reports.epochs)
    title = f"{title}, epoch {number + 1}"
    if killing is not None:
        killing.prepare_epoch(number)
    before = stage.store.read_counters()
    with display.show_epoch(title, stage.settings.files) as bar:

        def over() -> bool:
            bar.show_position(job.position(number))
            if killing is not None:
                killing.do_next_step(job)
            return len(job.reports.epochs) > number

        job.begin_epoch()
        job.wait_for(over, stage.settings.deadline)
    after = stage.store.read_counters()
    epoch = DemoEpoch(
        job.reports.epochs[number], job.positions(number), after.requests - before.requests, after.bytes - before.bytes
    )
    display.report_epoch(title, epoch)
    return epoch
