"""cachectl job and stalls: published sequences of jobs, their progress, and their waits."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import click

from cachefs.errors import AccessDenied, ConfigError, NotFound
from cachefs.formatting import format_count
from cachefs.job_messages import JobEpoch, JobName, JobPriorityRequest, JobPublication, SampleMap, StallRow
from cachefs.messages import DatasetName, Empty
from cachefs.planning.sequences.sampler_spec import KINDS, SamplerSpec
from cachefs.rpc import DATASET_SHOW, JOB_CANCEL, JOB_EPOCH, JOB_LIST, JOB_PRIORITY, JOB_PUBLISH, JOB_SHOW, STALL_LIST
from cachefs_daemon.runtime.process_users import users_of
from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.content import dataset_path
from cachefs_tools.cachectl.display import table
from cachefs_tools.cachectl.job_page import COLUMNS, describe, describe_jobs, job_document
from cachefs_tools.cachectl.usage import CommandGroup
from cachefs_tools.escaped_names import escape_name

SOURCE = "cachectl"
# Seconds. Users publish by hand before the training starts, and no heartbeats follow.
LEASE = 3600.0
# Most ranks published at once.
MAX_RANKS = 8192
# Most epochs that the daemon accepts.
MAX_EPOCHS = 1_000_000


@click.group(cls=CommandGroup, aliases={"ls": "list", "rm": "cancel", "remove": "cancel"})
def job() -> None:
    """Publish in which order a job reads, and show how far it is."""


def parse_ranks(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """Parse an option such as `3`, `0-7` or `0-3,8` into ranks."""
    try:
        parts = [part.partition("-") for part in text.split(",")]
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor ranges of them like 0-3,8") from None
    if any(each.stop <= each.start for each in ranges) or sum(each.stop - each.start for each in ranges) > MAX_RANKS:
        raise click.BadParameter(f"{text!r}: each range goes up, and there are {MAX_RANKS:,} ranks at most")
    return list(dict.fromkeys(rank for each in ranges for rank in each))


@job.command()
@click.argument("name", metavar="JOB")
@click.argument("dataset", shell_complete=completion.datasets)
@click.option(
    "--sampler",
    type=click.Choice(KINDS),
    required=True,
    metavar="KIND",
    help=f"The sampler that gives the order of each epoch: {', '.join(KINDS)}.",
)
@click.option(
    "--seed", type=click.IntRange(-(2**63), 2**64 - 1), default=0, show_default=True, help="Seed of the sampler."
)
@click.option(
    "--epochs", type=click.IntRange(1, MAX_EPOCHS), default=1, show_default=True, help="How many epochs the job reads."
)
@click.option(
    "--size",
    "samples",
    type=click.IntRange(0, 2**32 - 1),
    help="Number of samples.  [default: of files, or records, there are]",
)
@click.option("--no-shuffle", is_flag=True, help="The sampler was made with shuffle=False.")
@click.option("--drop-last", is_flag=True, help="The sampler (torch-distributed) was made with drop_last=True.")
@click.option(
    "--world-size",
    type=click.IntRange(1, 2**31 - 1),
    default=1,
    show_default=True,
    help="Number of ranks of the whole job.",
)
@click.option(
    "--rank", "ranks", default="0", callback=parse_ranks, help="The ranks that run on this node, such as 3 or 0-7."
)
@click.option("--workers", type=click.IntRange(0, 4096), default=0, help="Number of workers of each rank's DataLoader.")
@click.option(
    "--batch-size", type=click.IntRange(1, 2**32 - 1), default=1, show_default=True, help="Samples of a batch."
)
@click.option(
    "--prefetch",
    type=click.IntRange(0, 4096),
    default=2,
    show_default=True,
    help="The prefetch_factor of the DataLoader.",
)
@click.option(
    "--files", type=click.File("rb"), help="The path of each sample in the dataset, one per line; - is stdin."
)
@click.option(
    "--records",
    metavar="FORMAT",
    help="Samples are records of files of this format: npy, tar, tfrecord or fixed:<bytes>.",
)
@click.option("--path", "paths", multiple=True, help="A file of records; may be given several times, in order.")
@click.option(
    "--order",
    "orders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="explicit: a file with the sample numbers of an epoch (.npy or text). Repeat it for the next epoch.",
)
@click.option("--pid", type=click.IntRange(min=0), default=0, help="The job ends with this process.")
@click.option(
    "--lease",
    type=click.FloatRange(min=0, min_open=True),
    default=LEASE,
    show_default=True,
    help="Without --pid, the job ends after this number of seconds without a read.",
)
@with_session
def publish(session: CommandSession, name: str, dataset: str, **options: Any) -> None:
    """Publish in which order JOB will read DATASET.

    The samples are then on this node before they are read. A sample is a file, in the order of the paths, unless
    --files or --records says otherwise.
    """
    if options["pid"]:
        check_own_process(options["pid"])
    sample_map = make_sample_map(options["files"], options["records"], options["paths"])
    orders = [read_order(path) for path in options["orders"]]
    if (options["sampler"] == "explicit") != bool(orders):
        raise click.UsageError("--order and --sampler explicit need each other")
    spec = SamplerSpec(
        kind=options["sampler"],
        size=count_samples(session, dataset, sample_map, options["samples"]),
        seed=options["seed"],
        epochs=len(orders) or options["epochs"],
        shuffle=not options["no_shuffle"],
        drop_last=options["drop_last"],
        replicas=options["world_size"] if options["sampler"] == "torch-distributed" else 1,
    )
    for rank in options["ranks"]:
        request = JobPublication(
            job=name, dataset=dataset, consumer=str(rank), map=sample_map, rank=rank, source=SOURCE,
            spec=rank_spec(spec, rank), world_size=options["world_size"], workers=options["workers"],
            batch_size=options["batch_size"], prefetch=options["prefetch"], pid=options["pid"], lease=options["lease"],
            pid_namespace=_pid_namespace(),
        )  # fmt: skip
        session.call(JOB_PUBLISH, request)
        for epoch, order in enumerate(orders):
            session.call(JOB_EPOCH, JobEpoch(job=name, consumer=str(rank), epoch=epoch, order=order))
    view = session.call(JOB_SHOW, JobName(job=name))
    samples = format_count(spec.size, "sample")
    session.print_result(
        job_document(view), f"published {name}: {samples} of {dataset}; see `cachectl job show {name}`"
    )


def check_own_process(pid: int) -> None:
    """Raise NotFound, or AccessDenied for another user's process, which the daemon would ignore."""
    if not Path(f"/proc/{pid}").exists():
        raise NotFound(f"there is no process {pid} on this node; --pid is the process id of the training")
    if os.geteuid() and os.geteuid() not in users_of(pid):
        raise AccessDenied(f"process {pid} is not yours; --pid takes one of your own, and only root may name any")


def _pid_namespace() -> int:
    """Return the id of this process's PID namespace; 0 if it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def rank_spec(spec: SamplerSpec, rank: int) -> SamplerSpec:
    """Return the sampler of one rank."""
    return dataclasses.replace(spec, rank=rank if spec.replicas > 1 else 0)


def make_sample_map(files: BinaryIO | None, records: str | None, paths: tuple[str, ...]) -> SampleMap | None:
    """Return the files of the samples; None: the files of the dataset in path order."""
    if files and records:
        raise click.UsageError("--files and --records exclude each other")
    if bool(records) != bool(paths):
        raise click.UsageError("--records and --path need each other")
    if files:
        return SampleMap(kind="files", paths=[dataset_path(line) for line in files.read().split(b"\n") if line])
    if records:
        return SampleMap(kind="records", indexer=records, paths=[dataset_path(path) for path in paths])
    return None


def count_samples(session: CommandSession, dataset: str, sample_map: SampleMap | None, samples: int | None) -> int:
    """Return the number of samples: as given, or the number of files."""
    if samples is not None:
        return samples
    if sample_map is None:
        return session.call(DATASET_SHOW, DatasetName(name=dataset)).dataset.files
    if sample_map.kind == "files":
        return len(sample_map.paths)
    raise click.UsageError("--records needs --size, the number of records that the sampler was made for")


def read_order(path: Path) -> bytes:
    """Return the sample numbers in a file, as little-endian uint32. Raises ConfigError for any other content."""
    import numpy as np  # takes 0.1 s, which would delay every other command

    try:
        if path.suffix == ".npy":
            numbers = np.load(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warns of an empty file, reported below
                numbers = np.loadtxt(path, dtype=np.int64, ndmin=1)
        if not isinstance(numbers, np.ndarray) or not numbers.size or not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError("expected whole numbers, one per sample")
        if numbers.ndim != 1 or not 0 <= numbers.min() <= numbers.max() < 2**32:
            raise ValueError("expected one sample number per line, or an array of one dimension")
        return bytes(numbers.astype("<u4").tobytes())
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"{path} is not an order of samples: {error}") from None


@job.command("list")
@with_session
def list_jobs(session: CommandSession) -> None:
    """Show all jobs that have published something.

    The columns are those of `job show`, of the loader that a job spends most time with. JOB-LEFT is the time until the
    end of the job, where the number of its epochs is known. Jobs that ended a while ago are shown too. Below the jobs
    is what was guessed for programs that have published nothing.
    """
    found = session.call(JOB_LIST, Empty())
    document = {"jobs": [job_document(view) for view in found.jobs], "guessed": found.guessed}
    session.print_result(document, *describe_jobs(found))


@job.command(
    help=f"""Show the progress of a job, and how long its training loop waited.

It says how long the job still takes, what part of its time the training loop waited, and why. A line with "!" at the
top says what is wrong now: for what reads wait, or why they fail.

{COLUMNS}
A line with "!" names a problem, and one with "?" a loader that is not understood, with what would help.
"""
)
@click.argument("name", metavar="JOB", shell_complete=completion.jobs)
@click.option("--ranks", "each_rank", is_flag=True, help="A row for each rank of the job.")
@with_session
def show(session: CommandSession, name: str, each_rank: bool) -> None:
    view = session.call(JOB_SHOW, JobName(job=name))
    session.print_result(job_document(view), *describe(view, each_rank=each_rank))


@job.command()
@click.argument("name", metavar="JOB", shell_complete=completion.jobs)
@with_session
def cancel(session: CommandSession, name: str) -> None:
    """Forget what a job has published.

    The job itself goes on, but nothing is read ahead for it any more.
    """
    session.print_result(session.call(JOB_CANCEL, JobName(job=name)), f"{name} is cancelled")


@job.command()
@click.argument("name", metavar="JOB", shell_complete=completion.jobs)
@click.argument("weight", type=float)
@with_session
def priority(session: CommandSession, name: str, weight: float) -> None:
    """Set the weight with which JOB shares its origin.

    Where an origin cannot give what all jobs want, each job gets bytes in proportion to its WEIGHT, from 0.01 to 100,
    and never more than it wants. The usual weight is 1: 2 gives a job twice the bytes of another, 0.5 half of them. A
    weight holds on all nodes of the cluster, at once, and until the job ends. Where an origin gives enough, weights
    change nothing. Only administrators of the daemon may set a weight above 1.
    """
    view = session.call(JOB_PRIORITY, JobPriorityRequest(job=name, weight=weight))
    session.print_result(job_document(view), f"{escape_name(name)} has weight {view.weight:g}")


@click.command()
@click.argument("name", metavar="[JOB]", default="", shell_complete=completion.jobs)
@with_session
def stalls(session: CommandSession, name: str) -> None:
    """Show reads that waited at the mount, by job and source.

    One row for each job, consumer, epoch and source, with reads that still wait.

    Epochs are counted from 1. The source is what they waited for: the origin, another node (peer NAME), the SSD, or a
    daemon that was away. NOW is how many of the reads still wait. Without a JOB it shows the reads of all jobs, and of
    readers that have published nothing.
    """
    found = session.call(STALL_LIST, JobName(job=name))
    if not found.rows:
        session.print_result(found, "no read had to wait")
        return
    session.print_result(
        found, table("JOB CONSUMER >EPOCH =SOURCE >READS >NOW? >WAITED >LONGEST", map(stall_row, found.rows))
    )


def stall_row(row: StallRow) -> tuple[str, ...]:
    """Return a row of `stalls`."""
    whose = (escape_name(row.job), escape_name(row.consumer), str(row.epoch + 1)) if row.job else ("-", "-", "-")
    return (
        *whose,
        row.source,
        f"{row.count:,}",
        f"{row.waiting:,}",
        f"{row.seconds:.2f} s",
        f"{1000 * row.longest:,.0f} ms",
    )
