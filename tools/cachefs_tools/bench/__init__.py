"""cachefs-bench: the project's figures, measured again on this machine. Every subcommand prints one JSON object.

Figures are ratios between two things measured in turns within one run, since machines are noisy.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click

from cachefs.errors import CachefsError
from cachefs_tools.bench import metadata, planning, reads
from cachefs_tools.bench.push_command import push_command
from cachefs_tools.bench.train_command import train_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure cachefs on this machine; prints JSON. Needs a C compiler and about a gigabyte of disk."""


@main.command("reads")
@click.option("--files", default=4000, show_default=True, help="Number of files.")
@click.option("--size", default=110 * 1024, show_default=True, help="Size of each in bytes.")
@click.option("--rounds", default=25, show_default=True, help="Passes over each tree.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work (default: a temporary directory).")
def reads_command(files: int, size: int, rounds: int, directory: Path | None) -> None:
    """Files per second on the mount beside the same files on the local disk, both cached."""
    _print(lambda work: reads.measure(work, reads.Shape(files, size, rounds)), directory)


@main.command("metadata")
@click.option("--files", default=200_000, show_default=True, help="Files of the tree that find(1) walks.")
@click.option("--entries", default=1_000_000, show_default=True, help="Entries of the snapshot that is mounted.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work (default: a temporary directory).")
def metadata_command(files: int, entries: int, directory: Path | None) -> None:
    """A repeated find(1) beside the same on the local disk; time and memory to mount a large snapshot."""
    _print(lambda work: metadata.measure(work, files, entries), directory)


@main.command("plan")
@click.option("--samples", default=1_300_000, show_default=True, help="Files of the dataset, one sample each.")
@click.option("--consumers", default=8, show_default=True, help="Ranks, or jobs.")
@click.option("--reads", default=100_000, show_default=True, help="How many are followed.")
def plan_command(samples: int, consumers: int, reads: int) -> None:
    """Processor time and memory of plan, followers, lookahead and eviction: ranks of one job, and jobs of their own."""
    with ProcessPoolExecutor(1, max_tasks_per_child=1, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(planning.measure, samples, consumers, reads, share=share) for share in (True, False)]
        click.echo(json.dumps([run.result() for run in runs], indent=2))


main.add_command(train_command)
main.add_command(push_command)


def _print(measure: Callable[[Path], dict[str, object]], directory: Path | None) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
            click.echo(json.dumps(measure(Path(work)), indent=2))
    except CachefsError as error:
        click.echo(f"cachefs-bench: {error}", err=True)
        sys.exit(1)
