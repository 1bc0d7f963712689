"""`cachefs-bench cluster`: runs a scenario of several nodes, and compares its figures with their bounds."""

import json
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, get_args

import click

from cachefs.errors import CachefsError
from cachefs_bench.cluster.faults import FAULTS, m5
from cachefs_bench.cluster.membership_change import m4
from cachefs_bench.cluster.node_loss import m3
from cachefs_bench.cluster.run import ClusterLoad, JobShape
from cachefs_bench.cluster.shares import shares
from cachefs_bench.cluster.steady import m1, m2
from cachefs_bench.cluster.warm_up import warm_up
from cachefs_bench.lab.reader import ScriptKind
from cachefs_bench.lab.scratch import scratch_directory

Scenario = Callable[..., dict[str, Any]]
SCENARIOS: Final[Mapping[str, Scenario]] = {
    "m1": m1,
    "m2": m2,
    "m3": m3,
    "m4": m4,
    "m5": m5,
    "warmup": warm_up,
    "shares": shares,
}
# Most ranks of a job: this machine runs a process for each.
MAX_RANKS: Final = 64
# Scenarios that run several jobs.
_FOR_JOBS: Final = ("m1", "m2")
DEFAULT: Final = ClusterLoad()


class _JobShapeType(click.ParamType[JobShape]):
    name = "RANKS[@RATE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> JobShape:
        if isinstance(value, JobShape):
            return value
        ranks, is_rated, rate = str(value).partition("@")
        try:
            shape = JobShape(int(ranks), float(rate) if is_rated else None)
        except ValueError:
            shape = JobShape(0)
        if not 1 <= shape.ranks <= MAX_RANKS or not (shape.rate is None or 1 <= shape.rate < math.inf):
            self.fail(f"{value!r} is not RANKS or RANKS@RATE, such as 4 or 2@50: 1 to {MAX_RANKS} ranks, 1 or more "
                      "samples/s", param, ctx)  # fmt: skip
        return shape


@click.command("cluster")
@click.option(
    "--scenario", required=True, type=click.Choice(tuple(SCENARIOS)), help="What happens (see docs/benchmarks.md)."
)
@click.option("--nodes", default=DEFAULT.nodes, show_default=True, type=click.IntRange(1, 32), help="Number of nodes.")
@click.option("--files", default=DEFAULT.files, show_default=True, type=click.IntRange(min=64), help="Number of files.")
@click.option(
    "--size", default=DEFAULT.size, show_default=True, type=click.IntRange(8, 256 << 10), help="Bytes of each file."
)
@click.option(
    "--epochs", default=DEFAULT.epochs, show_default=True, type=click.IntRange(min=1), help="Epochs of a job."
)
@click.option(
    "--rate", default=DEFAULT.rate, show_default=True, type=click.FloatRange(min=1), help="Samples/s of each rank."
)
@click.option(
    "--job-ranks", "jobs", multiple=True, type=_JobShapeType(),
    help="A job of RANKS ranks, which are on the nodes in turns, each with RATE samples/s; several times: several jobs "
    "(m1, m2).  [default: one job with a rank on each node, --rate]",
)  # fmt: skip
@click.option(
    "--capacity", default=DEFAULT.capacity, show_default=True, type=click.FloatRange(0.01, 8),
    help="Share of the dataset that all nodes hold together. m2 takes 0.5, m3 as much as lets the others hold all.",
)  # fmt: skip
@click.option(
    "--replicas", default=DEFAULT.replicas, show_default=True, type=click.IntRange(1, 2),
    help="Copies of each block. With 2, the nodes are in two zones in turns, and their tiers are twice as large.",
)  # fmt: skip
@click.option(
    "--slack", default=DEFAULT.slack, type=click.FloatRange(-1, 1),
    help="Share of its part that a node holds beyond it.  [default: for copies that move, see docs/benchmarks.md]",
)  # fmt: skip
@click.option(
    "--membership", "source", default=DEFAULT.source, show_default=True,
    type=click.Choice(["none", "static", "etcd"]), help="Who says which nodes there are; none: each is alone.",
)  # fmt: skip
@click.option(
    "--network", default=DEFAULT.network, show_default=True, type=click.Choice(["bridge", "switch", "loopback"]),
    help="Between nodes: a bridge between namespaces, a switch in user space, or none (all on 127.0.0.1).",
)  # fmt: skip
@click.option(
    "--seconds", default=60.0, show_default=True, type=click.FloatRange(min=1),
    help="How long each thing that goes wrong lasts (m5), and how long a change may take (m4).",
)  # fmt: skip
@click.option(
    "--only", multiple=True, type=click.Choice(FAULTS), help="Of what goes wrong in m5, only this; several times."
)
@click.option(
    "--torch", type=click.Choice(get_args(ScriptKind)),
    help="Jobs train with torch under `cachefs run`, with DistributedSampler and DataLoader; how the script does that.",
)  # fmt: skip
@click.option(
    "--endpoint",
    help="URL of a running S3 server, in which a bucket `cachefs-bench` is made and removed. Its credentials are in "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  [default: a server of rclone is started]",
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def cluster_command(
    scenario: str, seconds: float, only: tuple[str, ...], directory: Path | None, **options: Any
) -> None:
    """Run jobs on several nodes of this machine, with real mounts and an S3 server, and compare figures with bounds.

    It needs root, since each node has a network namespace (not with --network loopback). Every byte is checked.
    """
    load = ClusterLoad(**options)
    if load.torch is not None and find_spec("torch") is None:
        raise CachefsError("--torch needs torch, which is not installed here; install it with: pip install torch")
    if load.jobs and scenario not in _FOR_JOBS:
        raise click.UsageError(f"--job-ranks is for {' and '.join(_FOR_JOBS)}; the jobs of {scenario} are fixed")
    settings: dict[str, Any] = {}
    if scenario in ("m4", "m5"):
        settings["seconds"] = seconds
    if scenario == "m5" and only:
        settings["only"] = only
    with scratch_directory("cachefs-bench-", directory) as work:
        result = SCENARIOS[scenario](load, work, _print_line, **settings)
    for check in result["checks"]:
        bound = f"at most {check['most']:g}" if check["most"] is not None else f"at least {check['least']:g}"
        _print_line(f"{'ok  ' if check['met'] else 'MISS'} {check['what']}: {check['value']:.4g} ({bound})")
    click.echo(json.dumps(result, indent=2))


def _print_line(text: str) -> None:
    click.echo(text, err=True)
