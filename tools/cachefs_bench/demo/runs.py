"""The plot of the demo: one training loop with four data sources, then a daemon that is killed in the middle of an
epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from cachefs_tools.kernel_pages import drop_pages

from cachefs_bench.demo.daemon_kill import KILL_EPOCH, DaemonKill
from cachefs_bench.demo.display import DemoDisplay
from cachefs_bench.demo.job import TrainingProcess, start_training
from cachefs_bench.demo.loaders import FolderSource
from cachefs_bench.demo.results import DemoEpoch, DemoResult, DemoRun, KillEffect, require_equal_bytes
from cachefs_bench.demo.settings import EPOCHS
from cachefs_bench.demo.stage import DemoStage, file_system_type
from cachefs_bench.lab.node import LabNode


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
