"""`cachefs-bench slurm`: the cost of hints in a real Slurm."""

import json
import tempfile
from pathlib import Path

import click

from cachefs_bench import slurm_latency


@click.command("slurm")
@click.option("--jobs", default=200, show_default=True, type=click.IntRange(min=1), help="Submissions of each kind.")
@click.option(
    "--datasets", default=200, show_default=True, type=click.IntRange(1, 5000), help="Datasets in the hint file."
)
@click.option(
    "--nodes", default=64, show_default=True, type=click.IntRange(2, 1000), help="Nodes that each of them is on."
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def slurm_command(jobs: int, datasets: int, nodes: int, directory: Path | None) -> None:
    """Measure submissions to Slurm, with job_submit.lua and without.

    Two Slurms with four nodes each run on this machine, as root, and get jobs in turns.
    """
    with tempfile.TemporaryDirectory(prefix="cfs-", dir=directory) as work:
        load = slurm_latency.SlurmLoad(jobs, datasets, nodes)
        click.echo(json.dumps(slurm_latency.measure(Path(work), load), indent=2))
