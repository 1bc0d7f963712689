"""`cachefs-bench hints`: checks whether scores rank nodes as jobs do."""

import json

import click

from cachefs_bench.hints import HintsLoad, measure
from cachefs_bench.lab.scratch import scratch_directory

DEFAULT = HintsLoad()


@click.command("hints")
@click.option("--files", default=DEFAULT.files, show_default=True, type=click.IntRange(min=256), help="Of the dataset.")
@click.option("--rounds", default=DEFAULT.rounds, show_default=True, type=click.IntRange(min=1), help="Of all nodes.")
@click.option(
    "--rate", default=DEFAULT.rate, show_default=True, type=click.FloatRange(min=1), help="Samples/s of the job."
)
@click.option(
    "--bandwidth", default=DEFAULT.bandwidth / 1e6, show_default=True, type=click.FloatRange(min=0.1),
    help="Of the origin, in MB/s.",
)  # fmt: skip
@click.option(
    "--megabits", default=DEFAULT.megabits, show_default=True, type=click.FloatRange(min=1), help="Of each node's link."
)
def hints_command(files: int, rounds: int, rate: float, bandwidth: float, megabits: float) -> None:
    """Run the same job on four nodes that hold 0, 30, 60 and 100 % of its dataset, and compare with their scores.

    Each node has a network namespace, so it needs root. Then daemons are stopped and the service is killed, and it is
    seen what answers are like.
    """
    load = HintsLoad(files=files, rounds=rounds, rate=rate, bandwidth=bandwidth * 1e6, megabits=megabits)
    with scratch_directory("cachefs-hints-") as work:
        click.echo(json.dumps(measure(load, work), indent=2))
