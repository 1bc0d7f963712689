"""cachectl bench: predicts the speed of a training job on a dataset of this node."""

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cachefs.errors import ConfigError
from cachefs.extras import require_extra
from cachefs.formatting import format_count
from cachefs.messages import DatasetName
from cachefs.rpc import DATASET_SHOW
from cachefs.sizes import parse_size
from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, to_json_types, with_session
from cachefs_tools.cachectl.display import size, table

if TYPE_CHECKING:
    from cachefs_tools.trial.verdict import TrialFigures


# Signals that end a trial in order: Ctrl-C, a request to end, a closed terminal.
_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: object) -> None:
    """Interrupt once: later signals must not disturb the clean-up, whose steps all have deadlines."""
    for ends in _ENDS:
        signal.signal(ends, signal.SIG_IGN)
    raise KeyboardInterrupt


@click.command()
@click.argument("dataset", shell_complete=completion.datasets)
@click.option("--rate", default=500.0, type=click.FloatRange(0.1, 1e6), help="Samples per second of the job.  [500]")
@click.option("--batch", default=64, type=click.IntRange(1, 65536), help="Samples of a batch.  [64]")
@click.option("--workers", default=4, type=click.IntRange(1, 256), help="Threads that read.  [4]")
@click.option("--seconds", default=10.0, type=click.FloatRange(1, 600), help="Of an epoch without waits.  [10]")
@click.option("--epochs", default=2, type=click.IntRange(1, 10), help="The first one is cold.  [2]")
@click.option("--bytes", "most", default="256MiB", metavar="SIZE", help="Most that is read of the origin.  [256MiB]")
@click.option("-y", "--yes", is_flag=True, help="Do not ask whether to read from the origin.")
@with_session
def bench(  # noqa: PLR0913  # a parameter for each option
    session: CommandSession,
    dataset: str,
    rate: float,
    batch: int,
    workers: int,
    seconds: float,
    epochs: int,
    most: str,
    yes: bool,
) -> None:
    """Predict the speed of a training job on DATASET on this node.

    It asks the origin, mounts the dataset for itself, and plays a job that reads some files in a published order and
    computes between batches. It says how long that job waited, and what to change. A file is a sample. What was not on
    the node before is evicted again, and nothing is left mounted.
    """
    with require_extra("mount,daemon", "cachectl bench"):
        import cachefs_daemon.origin.s3.origin  # noqa: F401
        from cachefs_tools.trial.extent import TrialJob, choose_files, origin_bounds
        from cachefs_tools.trial.trial import Trial
        from cachefs_tools.trial.verdict import verdict_sentences

    try:
        job = TrialJob(rate, batch, workers, seconds, epochs, parse_size(most))
    except ValueError as error:
        raise ConfigError(f"--bytes {most}: {error}") from None
    for ends in _ENDS:
        signal.signal(ends, _end)
    detail = session.call(DATASET_SHOW, DatasetName(name=dataset))
    choice = choose_files(session.client, detail, job, seed=detail.dataset.created_ns)
    look = origin_bounds(job, choice.mean_size)
    cold = sum(sample.size for sample in choice.cold_samples)
    count, requests = size(look.max_bytes + cold), look.max_requests + choice.max_requests
    session.confirm(f"This reads up to {count} of the origin, in up to {format_count(requests, 'request')}", yes)
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("starting", total=len(choice.samples))
        trial = Trial(
            session.client, session.socket, detail, job, choice,
            lambda what, done: bar.update(task, description=what, completed=done),
        )  # fmt: skip
        found = trial.run()
    sentences = [*verdict_sentences(found), *trial.remarks]
    session.print_result(document(found, sentences), *describe(found, sentences))


def document(found: "TrialFigures", sentences: list[str]) -> dict[str, object]:
    """Return the document of `--json`."""
    choice, warm = found.choice, found.warm
    return {
        "job": to_json_types(found.job),
        "samples": len(choice.samples),
        "sample_bytes": choice.mean_size,
        "cached_before": len(choice.samples) - len(choice.cold_samples),
        "demand": found.demanded_rate,
        "origin": to_json_types(found.origin),
        "epochs": [{**to_json_types(epoch), "waiting": epoch.waiting_share} for epoch in found.epochs],
        "warm": None if warm is None else {**to_json_types(warm), "ratio": warm.ratio},
        "dataset_bytes": found.dataset_bytes,
        "capacity": found.capacity,
        "verdict": sentences,
    }


def describe(found: "TrialFigures", sentences: list[str]) -> Iterator[str | Table]:
    """Yield the output: figures, then their meaning."""
    choice, origin, warm = found.choice, found.origin, found.warm
    cached = len(choice.samples) - len(choice.cold_samples)
    yield (
        f"job        {found.job.rate:,.0f} samples/s of {size(choice.mean_size)}: {found.demanded_rate / 1e6:,.0f} MB/s"
        f"; batches of {found.job.batch}, {format_count(found.job.workers, 'worker')}"
    )
    yield f"files      {len(choice.samples):,}, of which {cached:,} were on the node before"
    yield f"origin     small reads {1e3 * origin.p50:.1f} ms, 99 % within {1e3 * origin.p99:.1f} ms"
    if origin.throughput:
        yield ""
        rows = ((each.width, f"{each.bytes / 1e6:,.1f}", f"{each.answers:,.0f}") for each in origin.throughput)
        yield table(">AT-ONCE >MB/S >ANSWERS/S", rows)
    if found.epochs:
        yield ""
        yield table(
            ">EPOCH >SAMPLES >SECONDS >WAITED >FIRST-BATCH >READ-P50 >READ-P99",
            (
                (number, f"{each.samples:,}", f"{each.seconds:.1f}", f"{100 * each.waiting_share:.1f} %",
                 f"{each.first_batch:.2f} s", f"{1e3 * each.read_p50:.2f} ms", f"{1e3 * each.read_p99:.2f} ms")
                for number, each in enumerate(found.epochs, 1)
            ),
        )  # fmt: skip
    yield ""
    if warm is not None:
        yield f"tiers      {warm.tier / 1e6:,.0f} MB/s for one reader, {1e3 * warm.tier_p50:.2f} ms for a file"
        yield (
            f"warm       {warm.mount_us:.0f} us for a file through the mount, {warm.native_us:.0f} us natively: "
            f"{100 * warm.ratio:.0f} % of native speed"
        )
        yield ""
    yield from sentences
