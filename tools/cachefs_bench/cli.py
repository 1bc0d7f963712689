"""cachefs-bench: measures the project's figures again on this machine.

Subcommands print one JSON document; `miss` and `refetch` print a table, or the document with `--json`.

Machines are noisy, so most figures are ratios of two things measured alternately in one run.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cachefs.errors import ConfigError
from cachefs_bench.orderly_exit import orderly_exit
from cachefs_tools.quiet_imports import quiet_imports

with quiet_imports():
    from cachefs_bench import eviction_rules, first_epoch, growth, metadata, origin_get, origin_limits, planning, reads
    from cachefs_bench.block_budget import block_command
    from cachefs_bench.cluster.command import cluster_command
    from cachefs_bench.extender.response_times import extender_command
    from cachefs_bench.hints import hints_command
    from cachefs_bench.listing_speed import listing_command
    from cachefs_bench.misses import miss_command
    from cachefs_bench.own_process import in_own_process
    from cachefs_bench.peers import peers_command
    from cachefs_bench.programs.command import programs_command
    from cachefs_bench.push_command import push_command
    from cachefs_bench.refetch import refetch_command
    from cachefs_bench.scenario import DatasetShape
    from cachefs_bench.scheduling.command import scheduling_command
    from cachefs_bench.slurm_latency import slurm_command
    from cachefs_bench.train_command import train_command


class _Commands(click.Group):
    """A group whose commands end with one line after a failure or an interruption, and leave nothing behind."""

    def invoke(self, context: click.Context) -> Any:
        with orderly_exit("cachefs-bench"):
            return super().invoke(context)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure cachefs on this machine.

    Every subcommand prints one JSON document (miss: a table, or with --json the document), and says on standard error
    what it does. It needs a C compiler and about a gigabyte of disk.
    """


@main.command("reads")
@click.option("--files", default=4000, show_default=True, help="Number of files of the dataset.")
@click.option("--size", default=110 * 1024, show_default=True, help="Bytes of each file.")
@click.option("--rounds", default=25, show_default=True, help="How often each tree is read.")
@click.option("--python", "pythons", multiple=True, help="An interpreter that reads too.  [default: this one]")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def reads_command(files: int, size: int, rounds: int, pythons: tuple[str, ...], directory: Path | None) -> None:
    """Measure reads of the mount and of the local disk: by a program in C, and as Python programs do it.

    The same files are in both, and all of them are cached.
    """
    load = reads.WarmReadLoad(files, size, rounds, pythons or (sys.executable,))
    _print(lambda work: reads.measure(work, load), directory)


@main.command("metadata")
@click.option("--files", default=200_000, show_default=True, help="Number of files that find(1) looks at.")
@click.option(
    "--entries", default=1_000_000, show_default=True, help="Number of entries of the snapshot that is mounted."
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def metadata_command(files: int, entries: int, directory: Path | None) -> None:
    """Measure a repeated find(1) and the mounting of a large snapshot.

    find(1) runs on the mount and on the local disk. Of mounting it measures the time and the memory.
    """
    _print(lambda work: metadata.measure(work, files, entries), directory)


@main.command("plan")
@click.option(
    "--samples", default=1_300_000, show_default=True, help="Number of files of the dataset. Each is one sample."
)
@click.option("--consumers", default=8, show_default=True, help="Number of ranks, or of jobs.")
@click.option("--reads", default=100_000, show_default=True, help="Number of reads that are followed.")
@click.option(
    "--hits", metavar="BLOCKS", type=click.IntRange(64, 20_000),
    help="Instead, simulate which reads of a dataset of that many blocks hit a small cache, by the rule of eviction.",
)  # fmt: skip
@click.option("--seed", default=1, show_default=True, help="Seed of the orders of --hits.")
def plan_command(samples: int, consumers: int, reads: int, hits: int | None, seed: int) -> None:
    """Measure processor time and memory of all decisions.

    These are the plan, the followers, the lookahead and the eviction. The consumers are once ranks of one job, and
    once jobs of their own.

    With --hits: the hits of 4 jobs by `alsd`, by two simpler rules, and by offline Belady. 1,000 blocks take 2 minutes.
    """
    if hits is not None:
        click.echo(json.dumps(eviction_rules.measure(hits, seed), indent=2))
        return
    runs = [in_own_process(planning.measure, samples, consumers, reads, share=share) for share in (True, False)]
    click.echo(json.dumps(runs, indent=2))


@main.command("growth")
@click.option(
    "--blocks", default=1_300_000, show_default=True, type=click.IntRange(min=1000), help="Blocks of the dataset."
)
@click.option(
    "--nodes",
    "sizes",
    multiple=True,
    default=(8, 64, 1000),
    show_default=True,
    type=click.IntRange(2, 65_000),
    help="Number of nodes; may be given several times.",
)
@click.option("--epochs", default=5, show_default=True, type=click.IntRange(1, 1000), help="Epochs that are decided.")
def growth_command(blocks: int, sizes: tuple[int, ...], epochs: int) -> None:
    """Measure the computations of a node of a large cluster.

    Processor time and memory of placement, copies and duties, as each node computes them for itself, with that many
    simulated peers; and the messages that nodes send each other while nothing happens, and while a job reads.
    """
    runs = [in_own_process(growth.measure, blocks, nodes, epochs) for nodes in sizes]
    click.echo(json.dumps(runs, indent=2))


@main.command("origin")
@click.option(
    "--endpoint",
    metavar="URL",
    help="A running S3 server, in which a bucket `cachefs-bench` is made and removed. Its credentials are in "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  [default: nginx is started, or rclone's server]",
)
@click.option(
    "--gets", default=4000, show_default=True, type=click.IntRange(min=1), help="GETs of each client in each turn."
)
@click.option(
    "--size",
    default=origin_get.SMALL_OBJECT,
    show_default=True,
    type=click.IntRange(min=8),
    help="Bytes of each object.",
)
@click.option("--parallel", default=32, show_default=True, type=click.IntRange(min=1), help="GETs under way at once.")
@click.option("--turns", default=3, show_default=True, type=click.IntRange(min=1), help="How often each client runs.")
@click.option(
    "--throttle", metavar="RATE", type=click.FloatRange(min=0, min_open=True),
    help="Instead, read from a server that refuses more requests a second.",
)  # fmt: skip
@click.option(
    "--slow", metavar="SHARExFACTOR", help="Instead, read from a server some of whose answers are slow, as in 0.01x50."
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def origin_command(directory: Path | None, throttle: float | None, slow: str | None, turns: int, **load: Any) -> None:
    """Measure GETs of S3: processor time of each, and how many one event loop gets in a second.

    The daemon's own client runs beside aiobotocore, and beside a client that only receives, which is the limit.

    With --throttle or --slow: how the daemon's reads get on with such a server, and with how many requests.
    """
    if throttle is not None or slow is not None:
        try:
            limits = origin_limits.proxy_limits(throttle or 0.0, slow)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        _print(lambda work: origin_limits.measure(work, limits=limits, **load), directory)
    else:
        _print(lambda work: origin_get.measure(work, turns=turns, **load), directory)


@main.command("first-epoch")
@click.option("--files", default=20_000, show_default=True, type=click.IntRange(min=64), help="Number of files.")
@click.option(
    "--size", default=110_000, show_default=True, type=click.IntRange(8, 4 << 20), help="Bytes of each file: one block."
)
@click.option("--workers", default=8, show_default=True, type=click.IntRange(min=1), help="Threads of the reader.")
@click.option("--turns", default=3, show_default=True, type=click.IntRange(min=1), help="How often each way runs.")
@click.option(
    "--endpoint",
    metavar="URL",
    help="A running S3 server, in which a bucket `cachefs-bench` is made and removed. Its credentials are in "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  [default: a server of rclone is started]",
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def first_epoch_command(
    files: int, size: int, workers: int, turns: int, endpoint: str | None, directory: Path | None
) -> None:
    """Measure a first epoch at full speed, beside a download.

    A published job reads through a mount of an empty node as fast as it can; `rclone copy` gets the same files into a
    directory. Both keep them in memory, which must have room for them.
    """
    shape = DatasetShape(files=files, size=size, epochs=1, workers=workers, demand=1e6)
    _print(lambda work: first_epoch.measure(work, endpoint, shape, turns), directory)


main.add_command(train_command)
main.add_command(programs_command)
main.add_command(push_command)
main.add_command(block_command)
main.add_command(listing_command)
main.add_command(miss_command)
main.add_command(refetch_command)
main.add_command(cluster_command)
main.add_command(hints_command)
main.add_command(peers_command)
main.add_command(scheduling_command)
main.add_command(extender_command)
main.add_command(slurm_command)


def _print(measure: Callable[[Path], dict[str, object]], directory: Path | None) -> None:
    """Run *measure* in a temporary directory below *directory*, and print its document."""
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
        click.echo(json.dumps(measure(Path(work)), indent=2))
