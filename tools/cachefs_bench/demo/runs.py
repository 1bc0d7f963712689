"""The plot of the demo: one training loop with four data sources, then a daemon that is killed in the middle of an
epoch.

`DaemonKill` kills the daemon, and restarts it at once, like systemd would. By then the tiers hold all blocks. Before
that epoch the kernel's pages are dropped, so that its reads need the tiers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachefs_tools.kernel_pages import drop_pages

from cachefs.errors import CachefsError
from cachefs_bench.demo.display import DemoDisplay
from cachefs_bench.demo.job import TrainingProcess, start_training
from cachefs_bench.demo.loaders import FolderSource
from cachefs_bench.demo.results import (
    DemoEpoch,
    DemoResult,
    DemoRun,
    KillEffect,
    LoopPosition,
    longest_wait,
    require_equal_bytes,
)
from cachefs_bench.demo.settings import EPOCHS
from cachefs_bench.demo.stage import DemoStage, file_system_type
from cachefs_bench.lab.node import LabNode

# Number of the epoch, and the share of it after which the daemon is killed.
KILL_EPOCH: Final = EPOCHS - 1
KILL_SHARE: Final = 0.5


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
        way = DataSource(
            "killed", "cachefs run, killed", f"its daemon gets SIGKILL in the middle of epoch {KILL_EPOCH + 1}",
            stage.cachefs_run_command(node), node,
        )  # fmt: skip
        run = _run(stage, display, way, killing)
        return run, killing.effect(run.epochs[KILL_EPOCH].positions)


def _run(stage: DemoStage, display: DemoDisplay, way: DataSource, killing: DaemonKill | None = None) -> DemoRun:
    before = stage.store.read_counters()
    with start_training(way.command, stage.environment(way.node), stage.work / f"{way.name}.log") as job:
        with display.show_work("starting the loop"):
            job.wait_ready(stage.settings.files)
        listed = stage.store.read_counters()
        epochs = [_epoch(stage, display, job, way.title, killing) for _ in range(EPOCHS)]
    return DemoRun(way.name, way.title, way.explanation, epochs, listed.requests - before.requests)


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
