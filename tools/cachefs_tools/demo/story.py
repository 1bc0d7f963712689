"""The plot of the demo: one training loop with four data sources, then a daemon that is killed in the middle of an
epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from cachefs_tools.demo.display import Display
from cachefs_tools.demo.figures import Epoch, Kill, Run, Story, require_equal_bytes
from cachefs_tools.demo.job import Job, started_job
from cachefs_tools.demo.killing import KILLED_IN, Killing
from cachefs_tools.demo.loaders import Folder
from cachefs_tools.demo.settings import EPOCHS
from cachefs_tools.demo.stage import Stage, file_system_of
from cachefs_tools.kernel_pages import forget_pages
from cachefs_tools.lab.node import Node


@dataclass(frozen=True, slots=True)
class Way:
    """A data source of the training loop."""

    name: str
    title: str
    explanation: str
    command: Sequence[str]
    node: Node | None = None


def tell(stage: Stage, display: Display) -> Story:
    """Make all runs, one after the other. Raises CachefsError if one fails, or reads other bytes than the others."""
    threads = f"{stage.settings.workers} thread{'s' if stage.settings.workers > 1 else ''}"
    direct = Way("s3", "S3, no cachefs", f"one GET per sample, botocore (inside boto3), {threads}", stage.from_store())
    runs = [_run(stage, display, direct)]
    with stage.node("mount", display) as node:
        mounted = Way("mount", "cachefs mount", "plain files, nothing published", stage.training(node), node)
        runs.append(_run(stage, display, mounted))
    with stage.node("run", display) as node:
        explanation = "one line publishes the order of both epochs"
        published = Way("run", "cachefs run", explanation, stage.under_run(node), node)
        runs.append(_run(stage, display, published))
    source = Folder(str(stage.source))
    forget_pages(source.path(name) for name in source.names)
    local = Way("local", "local disk", f"the same files on {file_system_of(stage.source)}", stage.training())
    runs.append(_run(stage, display, local))
    killed, kill = _killed_run(stage, display)
    story = Story(stage.settings.files, stage.total, runs, killed, kill)
    require_equal_bytes(story)
    return story


def _killed_run(stage: Stage, display: Display) -> tuple[Run, Kill]:
    """Run under `cachefs run` on a new node whose daemon is killed in the last epoch."""
    with stage.node("killed", display) as node:
        killing = Killing(node, stage, display)
        way = Way(
            "killed", "cachefs run, killed", f"its daemon gets SIGKILL in the middle of epoch {KILLED_IN + 1}",
            stage.under_run(node), node,
        )  # fmt: skip
        run = _run(stage, display, way, killing)
        return run, killing.result(run.epochs[KILLED_IN].positions)


def _run(stage: Stage, display: Display, way: Way, killing: Killing | None = None) -> Run:
    before = stage.store.counters()
    with started_job(way.command, stage.environment(way.node), stage.work / f"{way.name}.log") as job:
        with display.working("starting the loop"):
            job.ready(stage.settings.files)
        listed = stage.store.counters()
        epochs = [_epoch(stage, display, job, way.title, killing) for _ in range(EPOCHS)]
    return Run(way.name, way.title, way.explanation, epochs, listed.requests - before.requests)


def _epoch(stage: Stage, display: Display, job: Job, title: str, killing: Killing | None) -> Epoch:
    number = len(job.said.epochs)
    title = f"{title}, epoch {number + 1}"
    if killing is not None:
        killing.before(number)
    before = stage.store.counters()
    with display.epoch(title, stage.settings.files) as bar:

        def over() -> bool:
            bar.move(job.position(number))
            if killing is not None:
                killing.during(job)
            return len(job.said.epochs) > number

        job.begin_epoch()
        job.until(over, stage.settings.deadline)
    after = stage.store.counters()
    epoch = Epoch(
        job.said.epochs[number], job.positions(number), after.requests - before.requests, after.bytes - before.bytes
    )
    display.done(title, epoch)
    return epoch
