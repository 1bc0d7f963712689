"""`cachefs-bench scheduling`: a simulated cluster with hundreds of jobs, with and without scheduler hints."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from cachefs_bench.scheduling.figures import measure, run_sweep
from cachefs_bench.scheduling.simulation import POLICIES
from cachefs_bench.scheduling.workload import SHAPES, SimulationShape

DEFAULT: Final = SimulationShape()
_RATE = click.FloatRange(1e6, 1e15)


@click.command("scheduling")
@click.option(
    "--workload", default="narrow", show_default=True, type=click.Choice(list(SHAPES)),
    help="Jobs: \"narrow\", a slow origin and fast readers, which was searched for with seed 1; or as published traces "
    "have them. Options below that are given count before it.",
)  # fmt: skip
@click.option("--nodes", default=DEFAULT.nodes, show_default=True, type=click.IntRange(2, 1000), help="Nodes.")
@click.option("--jobs", default=DEFAULT.jobs, show_default=True, type=click.IntRange(1, 100_000), help="Jobs.")
@click.option(
    "--datasets", default=DEFAULT.datasets, show_default=True, type=click.IntRange(1, 1000),
    help="Datasets, from 50 GB to 1 TB; jobs choose them by Zipf's law.",
)  # fmt: skip
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1, 100), help="How often, with other jobs.")
@click.option(
    "--first-seed", default=1, show_default=True, type=click.IntRange(0, 10**9),
    help="The first of them: 1 and 2 are those that scores were tuned with.",
)  # fmt: skip
@click.option(
    "--load", default=DEFAULT.load, show_default=True, type=click.FloatRange(0.01, 2),
    help="The part of all accelerators that would be busy if no job ever waited for data.",
)  # fmt: skip
@click.option(
    "--capacity", default=DEFAULT.capacity // 10**9, show_default=True, type=click.IntRange(1, 10**6),
    help="GB of each node's tiers.",
)  # fmt: skip
@click.option("--origin", default=DEFAULT.origin, show_default=True, type=_RATE, help="Bytes/s of the origin, for all.")
@click.option("--network", default=DEFAULT.peer_rate, show_default=True, type=_RATE, help="Bytes/s of a node's link.")
@click.option("--cold", is_flag=True, help="Begin with empty caches. Else each dataset is in the cluster once.")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(POLICIES), help="Only this; several times.  [default: all]"
)
@click.option(
    "--jobs-per-copy",
    default=6,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="The limit of suspend and clone.",
)
@click.option(
    "--processes", default=lambda: min(os.cpu_count() or 1, 8), show_default="processors, 8 at most",
    type=click.IntRange(1, 64), help="Runs at the same time.",
)  # fmt: skip
@click.option(
    "--sweep", "varies", is_flag=True,
    help="Least loaded, labels and hints only, but in other clusters too: a slower or faster origin, shorter or longer "
    "jobs, less load, smaller or larger caches, one at a time.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Also draw a picture into this file."
)
def scheduling_command(  # noqa: PLR0913
    workload: str, seeds: int, first_seed: int, capacity: int, network: float, cold: bool, policies: tuple[Any, ...],
    jobs_per_copy: int, processes: int, varies: bool, plot: Path | None, **shape: Any,
) -> None:  # fmt: skip
    """Simulate jobs on a cluster whose scheduler has no hints, labels of nodes, or our scores.

    The same jobs come at the same times to the same caches. The scores are those that cachefs-scheduler gives, made by
    the same code. It measures no time of this machine, so that every machine gets the same figures.
    """
    source = click.get_current_context().get_parameter_source
    values = {"capacity": capacity * 10**9, "peer_rate": network, **shape}
    options = {"capacity": "capacity", "peer_rate": "network"}
    own = {name: value for name, value in values.items() if source(options.get(name, name)) != ParameterSource.DEFAULT}
    chosen = replace(SHAPES[workload], warm=not cold, **own)
    numbers = tuple(range(first_seed, first_seed + seeds))
    if varies:
        if policies:
            raise click.UsageError("--sweep has its own policies: leave out --policy, or --sweep")
        found = run_sweep(chosen, numbers, processes)
        if plot:
            from cachefs_bench.plot import draw_sweep

            draw_sweep(found, plot)
        click.echo(json.dumps(found, indent=2))
        return
    result = measure(chosen, numbers, jobs_per_copy, processes, policies or POLICIES)
    if plot:
        from cachefs_bench.plot import draw_policies

        draw_policies(result, plot)
    for of_policy in result["policies"].values():
        for run in of_policy["runs"]:
            del run["completions"]
    click.echo(json.dumps(result, indent=2))
