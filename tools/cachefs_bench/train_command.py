"""`cachefs-bench train`: turns options into runs, and results into a table, JSON and a plot.

`keep_cores_busy` keeps processor cores busy during the runs, as on a training node.

`measure_ceiling` measures the throttling proxy without limits. A benchmark compares this with the rate that the proxy
let through: if the two are close, the benchmark measured the proxy.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
from botocore.config import Config
from botocore.session import Session
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs.planning.eviction.policies import POLICIES
from cachefs_bench import scenario, training_run
from cachefs_bench.lab.scratch_node import S3Credentials
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.origin_server import BUCKET, OriginServer, run_filled_server
from cachefs_bench.sample_data import sample_name
from cachefs_bench.scenario import (
    DatasetShape,
    JobLoader,
    Publishing,
    Scenario,
    TierShares,
    TrainingJob,
    best_publishing,
)
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill

CONNECTIONS: Final = 16
SECONDS: Final = 2.0
JOB_COLUMNS = (
    "utili-\nsation",
    "first\nbatch s",
    "samples\n/s",
    "stalled\ns",
    "by epoch",
    "stall after\nepoch 1",
    "late after\nepoch 1",
    "wrong",
)
NODE_COLUMNS = ("on node\nafter 1st", "origin\nMB", "of the\nleast", "busy\ncores")
# The unlimited proxy must be this many times faster than its limits; otherwise it is part of the measurement.
MIN_HEADROOM: Final = 2.0
CEILING_FILES: Final = 64
DEFAULT: Final = DatasetShape()


@dataclass(frozen=True, slots=True)
class ProxyCeiling:
    """Rates of the proxy without limits."""

    requests_per_s: float  # measured, with the client and the server on the same machine
    bytes_per_s: float  # measured likewise
    cpu_requests_per_s: float  # what the proxy's processor time per request would allow on a core of its own
    cpu_bytes_per_s: float  # likewise, by processor time per byte


def measure_ceiling(
    throttle: Throttle, account: S3Credentials, paths: Sequence[str], seconds: float = SECONDS
) -> ProxyCeiling:
    """Read the objects *paths* (each `bucket/key`) repeatedly for *seconds*. The proxy's limits are lifted, and stay
    so."""
    throttle.set_limits(LinkLimits())
    requests = [_get_request(url) for url in _signed_urls(throttle.endpoint, account, paths)]
    before, start = throttle.read_counters(), time.monotonic()
    asyncio.run(_send_requests(throttle.endpoint, requests, start + seconds))
    after, elapsed = throttle.read_counters(), time.monotonic() - start
    count, size = after.requests - before.requests, after.bytes - before.bytes
    cpu = after.cpu_seconds - before.cpu_seconds
    return ProxyCeiling(count / elapsed, size / elapsed, count / cpu, size / cpu)


def _signed_urls(endpoint: str, account: S3Credentials, paths: Sequence[str]) -> list[str]:
    client = Session().create_client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=account.access_key,
        aws_secret_access_key=account.secret_key,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )  # fmt: skip
    locations = (path.split("/", 1) for path in paths)
    return [client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}) for bucket, key in locations]


def _get_request(url: str) -> bytes:
    parts = urlsplit(url)
    return f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()


async def _send_requests(endpoint: str, requests: Sequence[bytes], until: float) -> None:
    turns = cycle(requests)
    await asyncio.gather(*(_connection(endpoint, turns, until) for _ in range(CONNECTIONS)))


async def _connection(endpoint: str, requests: Iterator[bytes], until: float) -> None:
    parts = urlsplit(endpoint)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    while time.monotonic() < until:
        writer.write(next(requests))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()


@contextmanager
def keep_cores_busy(count: int) -> Iterator[None]:
    """Run *count* processes that only compute, for as long as the context lasts."""
    command = [*KILL_WITH_PARENT, sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            wait_or_kill(process)


def table(documents: list[dict[str, Any]]) -> Table:
    """Return a table with a row per job. The first job's row of a run also has the node's figures."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("", no_wrap=True)
    for heading in (*JOB_COLUMNS, *NODE_COLUMNS):
        result.add_column(heading, justify="right")
    for document in documents:
        title, node = document["run"], _node_cells(document)
        for job in document["jobs"]:
            result.add_row(title, *_job_cells(job), *node)
            title, node = "", []
    return result


def summary(document: dict[str, Any]) -> str:
    """Summarise a run in one line, by its first job."""
    job = document["jobs"][0]
    return (
        f"  utilisation {job['utilisation']:.3f}, stalled {job['stall_seconds']:.1f} s of {job['seconds']:.1f} s, "
        f"origin {document['origin']['bytes'] / 1e6:.1f} MB, {document['machine']['busy_cores']:.2f} cores busy"
    )


def _job_cells(job: dict[str, Any]) -> list[str]:
    return [
        f"{job['utilisation']:.3f}",
        f"{job['time_to_first_batch']:.2f}",
        f"{job['samples_per_s']:.0f}",
        f"{job['stall_seconds']:.1f}",
        " ".join(f"{epoch['stall_seconds']:.1f}" for epoch in job["epochs"]),
        f"{100 * job['stall_after_first_epoch']:.1f} %",
        f"{100 * job['late_after_first_epoch']:.2f} %",
        str(job["damaged"]),
    ]


def _node_cells(document: dict[str, Any]) -> list[str]:
    origin = document["origin"]
    return [
        f"{100 * document['found_on_node_after_first_batch']:.2f} %",
        f"{origin['bytes'] / 1e6:.1f}",
        f"{origin['samples'] / origin['expected_samples']['belady']:.3f}",
        f"{document['machine']['busy_cores']:.2f}",
    ]


@click.command("train")
@click.option(
    "--preset", type=click.Choice(scenario.PRESETS), help="A set of runs that show one thing (see docs/benchmarks.md)."
)
@click.option(
    "--only", multiple=True, help="Of the runs, only those with this in their title; may be given several times."
)
@click.option(
    "--busy",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Processor cores that something else keeps busy meanwhile.",
)
@click.option(
    "--loader",
    type=click.Choice([loader.value for loader in JobLoader]),
    default=JobLoader.TORCH.value,
    show_default=True,
    help="What reads: a torch DataLoader, or a loop over threads.",
)
@click.option(
    "--publish",
    "publishing",
    multiple=True,
    type=click.Choice([way.value for way in Publishing]),
    help="How the job says what it will read; may be given several times.  [default: none, and what suits the loader]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["clairvoyant"],
    show_default=True,
    type=click.Choice(tuple(POLICIES)),
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
@click.option("--files", default=DEFAULT.files, show_default=True, type=click.IntRange(min=2), help="Number of files.")
@click.option(
    "--size", default=DEFAULT.size, show_default=True, type=click.IntRange(8, 256 << 10), help="Bytes of each file."
)
@click.option(
    "--epochs", default=DEFAULT.epochs, show_default=True, type=click.IntRange(min=1), help="Epochs of each job."
)
@click.option(
    "--batch-size",
    default=DEFAULT.batch_size,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples of a batch.",
)
@click.option(
    "--workers", default=DEFAULT.workers, show_default=True, type=click.IntRange(min=0), help="Workers of the loader."
)
@click.option(
    "--prefetch",
    default=DEFAULT.prefetch,
    show_default=True,
    type=click.IntRange(min=1),
    help="Batches that each worker reads ahead.",
)
@click.option(
    "--demand",
    default=DEFAULT.demand,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Samples per second that the accelerator takes.",
)
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of jobs. Each has a seed of its own.",
)
@click.option(
    "--stagger", default=0.0, show_default=True, help="Seconds from the start of a job to the start of the next."
)
@click.option(
    "--latency", default=20.0, show_default=True, help="Milliseconds to the first byte of an answer, the median."
)
@click.option(
    "--latency-p99",
    default=60.0,
    show_default=True,
    help="Milliseconds to the first byte of an answer, the 99th percentile.",
)
@click.option("--bandwidth", default=0.0, help="MB/s of the whole origin (0: no limit).")
@click.option("--stream-bandwidth", default=0.0, help="MB/s of one connection (0: no limit).")
@click.option("--request-rate", default=0.0, help="Requests per second; more are answered with SlowDown (0: no limit).")
@click.option("--keep-pages", is_flag=True, help="Let the kernel's page cache keep what was read.")
@click.option(
    "--endpoint",
    help="URL of a running S3 server. Its credentials are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  "
    "[default: a server of rclone is started]",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the runs into this file (needs matplotlib)."
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def train_command(
    preset: str | None,
    only: tuple[str, ...],
    busy: int,
    endpoint: str | None,
    plot: Path | None,
    directory: Path | None,
    **options: Any,
) -> None:
    """Run training jobs in front of a slow origin.

    It measures how much of the time the accelerator computes, how long it stalls, and how much is fetched.
    """
    base = _base_scenario(options)
    runs = scenario.preset_scenarios(preset, base) if preset else _variants(base, options)
    runs = [run for run in runs if not only or any(part in run.title for part in only)]
    if not runs:
        raise click.UsageError(f"no run has {' or '.join(map(repr, only))} in its title")
    with keep_cores_busy(busy):
        if plot is not None:
            from cachefs_bench.plot import draw  # here, since matplotlib may be missing, and the runs take long
        result = _measure(runs[0].shape, runs, endpoint, directory)
        Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120).print(table(result["runs"]))
        if plot is not None:
            draw(result, plot)
        click.echo(json.dumps(result, indent=2))


def _measure(shape: DatasetShape, runs: list[Scenario], endpoint: str | None, directory: Path | None) -> dict[str, Any]:
    documents = []
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as name:
        work = Path(name)
        _print_line(f"writing {shape.files:,} files of {shape.size:,} bytes")
        with run_filled_server(work, shape, endpoint) as server:
            limit = _measure_ceiling(work, server, runs)
            for number, one in enumerate(runs):
                run_directory = work / f"run{number}"
                run_directory.mkdir()
                _print_line(f"run {number + 1} of {len(runs)}: {one.title}")
                documents.append(training_run.run_scenario(one, server, run_directory))
                _print_line(summary(documents[-1]))
    return {"proxy_ceiling": limit, "runs": documents}


def _base_scenario(options: dict[str, Any]) -> Scenario:
    """Return the run that the options describe, without options that may be repeated."""
    shape = DatasetShape(**{name: options[name] for name in DatasetShape.__dataclass_fields__})
    limits = LinkLimits(
        latency=options["latency"] / 1e3, latency_p99=options["latency_p99"] / 1e3,
        stream_bandwidth=1e6 * options["stream_bandwidth"], bandwidth=1e6 * options["bandwidth"],
        request_rate=options["request_rate"],
    )  # fmt: skip
    jobs = tuple(TrainingJob(seed=number, start=number * options["stagger"]) for number in range(options["jobs"]))
    return Scenario(
        title="",
        loader=JobLoader(options["loader"]),
        shape=shape,
        tiers=TierShares(memory=options["memory_share"]),
        limits=limits,
        jobs=jobs,
        keep_pages=options["keep_pages"],
    )


def _variants(base: Scenario, options: dict[str, Any]) -> list[Scenario]:
    """Return a run for every combination of the options that may be repeated."""
    named = [Publishing(name) for name in options["publishing"]]
    choices = named or [Publishing.NONE, best_publishing(base.loader)]
    return [
        replace(
            base, title=f"{policy}, {share:.0%}, publishing: {choice}", publishing=choice, policy=policy,
            tiers=replace(base.tiers, capacity=share),
        )
        for policy, share, choice in product(options["policies"], options["capacities"], choices)
    ]  # fmt: skip


def _measure_ceiling(work: Path, server: OriginServer, runs: list[Scenario]) -> dict[str, float]:
    """Measure the proxy without limits. Warns if the runs need nearly as much."""
    shape = runs[0].shape
    paths = [f"{BUCKET}/{sample_name(number)}" for number in range(min(CEILING_FILES, shape.files))]
    with run_throttle(server.endpoint, LinkLimits(), work / "ceiling.log") as throttle:
        found = measure_ceiling(throttle, server.credentials, paths)
    _print_line(
        f"without limits the proxy passes {found.bytes_per_s / 1e6:.0f} MB/s, {found.requests_per_s:.0f} requests/s, "
        "with its client and the server on this machine; "
        f"its own processor time would allow {found.cpu_bytes_per_s / 1e6:.0f} MB/s"
    )
    most = max(max(run.limits.bandwidth, len(run.jobs) * shape.demand_bytes) for run in runs)
    if found.bytes_per_s < MIN_HEADROOM * most:
        _print_line(
            f"warning: this is less than {MIN_HEADROOM:g} times the {most / 1e6:.0f} MB/s that the runs may need; "
            "lower --demand"
        )
    return asdict(found)


def _print_line(text: str) -> None:
    click.echo(text, err=True)
