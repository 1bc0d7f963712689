"""`cachefs-bench extender`: measures answers to kube-scheduler."""

import tempfile
from pathlib import Path

import click

from cachefs_bench.extender.response_times import ExtenderLoad, as_json, measure


@click.command("extender")
@click.option("--nodes", default=5000, show_default=True, type=click.IntRange(1, 16384), help="Of the cluster.")
@click.option(
    "--questions", default=400, show_default=True, type=click.IntRange(min=20),
    help="Of each kind; of those with whole nodes a tenth.",
)  # fmt: skip
def extender_command(nodes: int, questions: int) -> None:
    """Measure how long kube-scheduler waits for the extender, over HTTPS on loopback.

    The service has its own scoring, and nodes that are made up. Questions have the names of all nodes
    (nodeCacheCapable: true) or whole nodes (false), small ones and large ones.
    """
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-") as work:
        click.echo(as_json(measure(Path(work), ExtenderLoad(nodes, questions))))
