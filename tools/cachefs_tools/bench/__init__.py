"""cachefs-bench: measures the project's figures again on this machine. Every subcommand prints one JSON document.

Machines are noisy. Where possible, a figure is therefore a ratio of two things that are measured in turns in one run.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from cachefs.errors import CachefsError
from cachefs.extras import needs_extra

with needs_extra("bench", "cachefs-bench"):
    from cachefs_tools.bench import metadata, origin_get, planning, reads
    from cachefs_tools.bench.block_command import block_command
    from cachefs_tools.bench.listing_command import listing_command
    from cachefs_tools.bench.miss_command import miss_command
    from cachefs_tools.bench.push_command import push_command
    from cachefs_tools.bench.train_command import train_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure cachefs on this machine.

    Every subcommand prints one JSON document. It needs a C compiler and about a gigabyte of disk.
    """


@main.command("reads")
@click.option("--files", default=4000, show_default=True, help="Number of files of the dataset.")
@click.option("--size", default=110 * 1024, show_default=True, help="Bytes of each file.")
@click.option("--rounds", default=25, show_default=True, help="How often each tree is read.")
@click.option("--python", "pythons", multiple=True, help="An interpreter that reads too.  [default: this one]")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work.  [default: a temporary directory]")
def reads_command(files: int, size: int, rounds: int, pythons: tuple[str, ...], directory: Path | None) -> None:
    """Measure reads of the mount and of the local disk: by a program in C, and as Python programs do it.

    The same files are in both, and all of them are cached.
    """
    load = reads.WarmReads(files, size, rounds, pythons or (sys.executable,))
    _print(lambda work: reads.measure(work, load), directory)


@main.command("metadata")
@click.option("--files", default=200_000, show_default=True, help="Number of files that find(1) looks at.")
@click.option(
    "--entries", default=1_000_000, show_default=True, help="Number of entries of the snapshot that is mounted."
)
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work.  [default: a temporary directory]")
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
def plan_command(samples: int, consumers: int, reads: int) -> None:
    """Measure processor time and memory of all decisions.

    These are the plan, the followers, the lookahead and the eviction. The consumers are once ranks of one job, and
    once jobs of their own.
    """
    with ProcessPoolExecutor(1, max_tasks_per_child=1, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(planning.measure, samples, consumers, reads, share=share) for share in (True, False)]
        click.echo(json.dumps([run.result() for run in runs], indent=2))


@main.command("origin")
@click.option(
    "--endpoint",
    metavar="URL",
    help="A running S3 server, in which a bucket `cachefs-bench` is made and removed. Its credentials are in "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  [default: nginx is started, or rclone's server]",
)
@click.option("--gets", default=4000, show_default=True, help="GETs of each client in each turn.")
@click.option("--size", default=origin_get.SMALL, show_default=True, help="Bytes of each object.")
@click.option("--parallel", default=32, show_default=True, help="GETs under way at once.")
@click.option("--turns", default=3, show_default=True, help="How often each client runs.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work.  [default: a temporary directory]")
def origin_command(directory: Path | None, **load: Any) -> None:
    """Measure GETs of S3: processor time of each, and how many one event loop gets in a second.

    The daemon's own client runs beside aiobotocore, and beside a client that only receives, which is the limit.
    """
    _print(lambda work: origin_get.measure(work, **load), directory)


main.add_command(train_command)
main.add_command(push_command)
main.add_command(block_command)
main.add_command(listing_command)
main.add_command(miss_command)


def _print(measure: Callable[[Path], dict[str, object]], directory: Path | None) -> None:
    """Measure in a temporary directory below *directory* and print the document, or one line where that fails."""
    try:
        with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
            click.echo(json.dumps(measure(Path(work)), indent=2))
    except CachefsError as error:
        click.echo(f"cachefs-bench: {error}", err=True)
        sys.exit(1)
