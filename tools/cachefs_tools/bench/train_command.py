"""`cachefs-bench train`: from options to runs, and from what they measured to a table, JSON and a plot."""

import json
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from cachefs.errors import CachefsError
from cachefs_tools.bench import ceiling, scenario, train
from cachefs_tools.bench.link import Limits
from cachefs_tools.bench.origin_server import BUCKET, OriginServer, filled_server
from cachefs_tools.bench.report import summary, table
from cachefs_tools.bench.sample_data import sample_name
from cachefs_tools.bench.scenario import Job, Scenario, Shape, Tiers
from cachefs_tools.bench.throttle import throttled
from cachefs_tools.scratch_node import end_in_order_when_interrupted

# The proxy must be able to do this many times what it lets through, or it is part of what is measured.
HEADROOM: Final = 2.0
CEILING_FILES: Final = 64
DEFAULT: Final = Shape()


@click.command("train")
@click.option("--preset", type=click.Choice(scenario.PRESETS), help="A set of runs that show one thing (see the docs).")
@click.option("--loader", type=click.Choice(["torch", "plain"]), default="torch", show_default=True)
@click.option(
    "--publish",
    "publishing",
    multiple=True,
    type=click.Choice(scenario.PUBLISHING),
    help="How the job says what it will read; may be given several times.  [default: each the loader can]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["clairvoyant"],
    show_default=True,
    type=click.Choice(scenario.POLICIES),
    help="Eviction policy; may be given several times.",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    default=[1.0],
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the dataset that the tiers hold; may be given several times.",
)
@click.option(
    "--memory-share",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="The memory tier's part of the capacity.",
)
@click.option("--files", default=DEFAULT.files, show_default=True, type=click.IntRange(min=2))
@click.option(
    "--size", default=DEFAULT.size, show_default=True, type=click.IntRange(8, 256 << 10), help="Bytes of a file."
)
@click.option("--epochs", default=DEFAULT.epochs, show_default=True, type=click.IntRange(min=1))
@click.option("--batch-size", default=DEFAULT.batch_size, show_default=True, type=click.IntRange(min=1))
@click.option("--workers", default=DEFAULT.workers, show_default=True, type=click.IntRange(min=0))
@click.option("--prefetch", default=DEFAULT.prefetch, show_default=True, type=click.IntRange(min=1), help="Per worker.")
@click.option(
    "--demand",
    default=DEFAULT.demand,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Samples per second the accelerator takes.",
)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="With a seed of its own each.")
@click.option("--stagger", default=0.0, show_default=True, help="Seconds from one job's start to the next one's.")
@click.option("--latency", default=20.0, show_default=True, help="Median milliseconds to an answer's first byte.")
@click.option("--latency-p99", default=60.0, show_default=True, help="Its 99th percentile.")
@click.option("--bandwidth", default=0.0, help="MB/s of the origin (0: any).")
@click.option("--stream-bandwidth", default=0.0, help="MB/s of one connection (0: any).")
@click.option("--request-rate", default=0.0, help="Requests per second, above which it answers SlowDown (0: any).")
@click.option("--keep-pages", is_flag=True, help="Let the kernel's page cache keep what was read.")
@click.option(
    "--endpoint",
    help="URL of a running S3 server, with its credentials in AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY.  [default: start rclone's]",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the runs (needs matplotlib).")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work (default: a temporary directory).")
def train_command(
    preset: str | None, endpoint: str | None, plot: Path | None, directory: Path | None, **options: Any
) -> None:
    """Training jobs in front of a slow origin: accelerator utilisation, stalls and origin bytes."""
    end_in_order_when_interrupted()
    base = _base(options)
    runs = scenario.preset(preset, base) if preset else _variants(base, options)
    try:
        if plot is not None:
            from cachefs_tools.bench.plot import draw  # before the long part: matplotlib may be missing
        documents = []
        with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as name:
            work = Path(name)
            _say(f"writing {base.shape.files:,} files of {base.shape.size:,} bytes")
            with filled_server(work, base.shape, endpoint) as server:
                limit = _measure_ceiling(work, server, runs)
                for number, one in enumerate(runs):
                    place = work / f"run{number}"
                    place.mkdir()
                    _say(f"run {number + 1} of {len(runs)}: {one.title}")
                    documents.append(train.run(one, server, place))
                    _say(summary(documents[-1]))
        Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120).print(table(documents))
        result = {"proxy_ceiling": limit, "runs": documents}
        if plot is not None:
            draw(result, plot)
        click.echo(json.dumps(result, indent=2))
    except (CachefsError, OSError) as error:
        click.echo(f"cachefs-bench: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("cachefs-bench: interrupted; nothing is left mounted or running", err=True)
        sys.exit(130)


def _base(options: dict[str, Any]) -> Scenario:
    """The run the options describe, but for those that may be given several times."""
    shape = Shape(**{name: options[name] for name in Shape.__dataclass_fields__})
    limits = Limits(
        latency=options["latency"] / 1e3, latency_p99=options["latency_p99"] / 1e3,
        stream_bandwidth=1e6 * options["stream_bandwidth"], bandwidth=1e6 * options["bandwidth"],
        request_rate=options["request_rate"],
    )  # fmt: skip
    jobs = tuple(Job(seed=number, start=number * options["stagger"]) for number in range(options["jobs"]))
    return Scenario(
        title="", loader=options["loader"], shape=shape, tiers=Tiers(memory=options["memory_share"]), limits=limits,
        jobs=jobs, keep_pages=options["keep_pages"],
    )  # fmt: skip


def _variants(base: Scenario, options: dict[str, Any]) -> list[Scenario]:
    ways = options["publishing"] or ("none", "run" if base.loader == "torch" else "spec")
    return [
        replace(
            base, title=f"{policy}, {share:.0%}, publishing: {way}", publishing=way, policy=policy,
            tiers=replace(base.tiers, capacity=share),
        )
        for policy, share, way in product(options["policies"], options["capacities"], ways)
    ]  # fmt: skip


def _measure_ceiling(work: Path, server: OriginServer, runs: list[Scenario]) -> dict[str, float]:
    shape = runs[0].shape
    paths = [f"{BUCKET}/{sample_name(number)}" for number in range(min(CEILING_FILES, shape.files))]
    with throttled(server.endpoint, Limits(), work / "ceiling.log") as throttle:
        found = ceiling.measure(throttle, server.account, paths)
    _say(
        f"the proxy without limits: {found.bytes_per_s / 1e6:.0f} MB/s, {found.requests_per_s:.0f} requests/s with its "
        f"client and the server on this machine; {found.cpu_bytes_per_s / 1e6:.0f} MB/s by its own processor time"
    )
    most = max(max(one.limits.bandwidth, len(one.jobs) * shape.demand_bytes) for one in runs)
    if found.bytes_per_s < HEADROOM * most:
        _say(f"warning: less than {HEADROOM:g} times the {most / 1e6:.0f} MB/s it is to let through; lower --demand")
    return asdict(found)


def _say(text: str) -> None:
    click.echo(text, err=True)
