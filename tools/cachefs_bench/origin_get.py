"""Measures a GET of the daemon's own client, next to aiobotocore and to the least that a Python client can do.

Each client runs in turns in a process of its own, on one event loop, with a fixed number of concurrent requests.

`run_static_server` runs nginx over a directory: it answers GETs with ETag and ranges so quickly that the client is the
bottleneck. It ignores signatures.
"""

import asyncio
import os
import shutil
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs_bench.lab.scratch_node import SCRATCH_CREDENTIALS
from cachefs_bench.origin_server import BUCKET, OriginServer, run_filled_server
from cachefs_bench.own_process import in_own_process
from cachefs_bench.raw_client import RawClient
from cachefs_bench.sample_data import sample_name, write_samples
from cachefs_bench.scenario import DatasetShape
from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from cachefs_tools.child_programs import run_program, wait_until

_CONFIGURATION: Final = """
{user}
worker_processes 1;
daemon off;
pid {work}/pid;
error_log {work}/log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    keepalive_requests 10000000;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""
SMALL_OBJECT: Final = 110 << 10
RANGE: Final = 4 << 20
# Bytes of the object that is read in ranges.
LARGE_OBJECT: Final = 64 << 20
# GETs through aiobotocore are fewer by this factor, since each takes much longer.
_AIOBOTOCORE_DIVISOR: Final = 5
_DEADLINE: Final = 60.0
CLIENTS: Final = ("raw", "cachefs", "aiobotocore")


def find_nginx() -> str | None:
    """Return the path of nginx, or None."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def run_static_server(program: str, root: Path, work: Path) -> Iterator[str]:
    """Run nginx over the directory *root*, with its own files in *work*. Yields its URL."""
    work.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As root, nginx would switch to a user without access to temporary directories.
    user = "user root;" if os.geteuid() == 0 else ""
    configuration = work / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(user=user, work=work, port=port, root=root))
    log = work / "output"

    def has_response() -> bool:
        with socket.socket() as attempt:
            return attempt.connect_ex(("127.0.0.1", port)) == 0

    with run_program([program, "-p", str(work), "-c", str(configuration)], log) as process:
        wait_until(has_response, process, log)
        yield f"http://127.0.0.1:{port}"


@dataclass(frozen=True, slots=True)
class GetLoad:
    """The objects to read."""

    server: OriginServer
    # Bytes of each GET.
    size: int
    # Objects of the server, and bytes of each. Objects larger than a GET are read in ranges.
    files: int
    object_size: int
    # GETs of each client in each turn.
    count: int
    # Concurrent GETs.
    concurrency: int


@dataclass(frozen=True, slots=True)
class GetCost:
    """The cost of one client in one turn."""

    # Processor seconds per GET.
    cpu: float
    # GETs per second.
    rate: float
    # Peak growth of the process in bytes, including unmeasured GETs.
    memory: int


Get = Callable[[ObjectRange], Awaitable[int]]


def measure(work: Path, endpoint: str | None, gets: int, size: int, parallel: int, turns: int) -> dict[str, Any]:
    """Return the figures. endpoint: of a running S3 server; None: one is started. size: bytes of an object."""
    found: dict[str, Any] = {"parallel": parallel, "turns": turns}
    shapes = {"objects": DatasetShape(files=256, size=size), "ranges": DatasetShape(files=1, size=LARGE_OBJECT)}
    for name, shape in shapes.items():
        directory = work / name
        directory.mkdir()
        with run_bench_server(directory, shape, endpoint) as (kind, server):
            bytes_each = min(shape.size, RANGE)
            count = max(2 * parallel, gets // max(1, bytes_each // SMALL_OBJECT // 2))
            load = GetLoad(server, bytes_each, shape.files, shape.size, count, parallel)
            found["server"] = kind
            found[name] = {"bytes": bytes_each, "gets": count, **_compare(load, turns)}
    return found


@contextmanager
def run_bench_server(work: Path, shape: DatasetShape, endpoint: str | None) -> Iterator[tuple[str, OriginServer]]:
    """Yield the kind of server, and the server filled with the dataset. endpoint: of a running server."""
    nginx = find_nginx()
    if endpoint is None and nginx is not None:
        write_samples(work / "buckets" / BUCKET, shape.files, shape.size)
        with run_static_server(nginx, work / "buckets", work / "nginx") as own:
            yield "nginx", OriginServer(own, SCRATCH_CREDENTIALS)
    else:
        with run_filled_server(work, shape, endpoint) as server:
            yield endpoint or "rclone", server


def _compare(load: GetLoad, turns: int) -> dict[str, Any]:
    costs: dict[str, list[GetCost]] = {client: [] for client in CLIENTS}
    for turn in range(turns):
        for client in CLIENTS:
            click.echo(
                f"turn {turn + 1} of {turns}: {load.count:,} GETs of {load.size:,} bytes by {client} ...", err=True
            )
            costs[client].append(in_own_process(_run_turn, client, load))
    figures = {client: _figures(of_client, load.size) for client, of_client in costs.items()}
    return {**figures, **_ratios(costs, "aiobotocore"), **_ratios(costs, "raw")}


def _ratios(costs: dict[str, list[GetCost]], other: str) -> dict[str, float]:
    """Return the medians of our figures relative to another client's, per turn, since a machine's load varies between
    turns."""
    turns = list(zip(costs["cachefs"], costs[other], strict=True))
    return {
        f"cpu_to_{other}": round(statistics.median(ours.cpu / theirs.cpu for ours, theirs in turns), 3),
        f"rate_to_{other}": round(statistics.median(ours.rate / theirs.rate for ours, theirs in turns), 2),
    }


def _figures(costs: list[GetCost], size: int) -> dict[str, Any]:
    rate = statistics.median(cost.rate for cost in costs)
    return {
        "cpu_us": round(1e6 * statistics.median(cost.cpu for cost in costs), 1),
        "per_second": round(rate, 1),
        "gb_per_second": round(rate * size / 1e9, 3),
        "grew_mb": round(max(cost.memory for cost in costs) / 1e6, 1),
    }


def _run_turn(client: str, load: GetLoad) -> GetCost:
    return asyncio.run(_run(client, load))


async def _run(client: str, load: GetLoad) -> GetCost:
    # aiobotocore and the daemon read them from there.
    os.environ.update(
        AWS_ACCESS_KEY_ID=load.server.credentials.access_key, AWS_SECRET_ACCESS_KEY=load.server.credentials.secret_key
    )
    async with _botocore(load) as full:
        wanted = await _list_ranges(load, full)
        async with _OPENERS[client](load, full, wanted) as get:
            return await _measure_cost(
                load, get, wanted[: load.count // _AIOBOTOCORE_DIVISOR] if client == "aiobotocore" else wanted
            )


async def list_ranges(load: GetLoad) -> list[ObjectRange]:
    """Return all ranges to read. Asks the server for ETags."""
    async with _botocore(load) as full:
        return await _list_ranges(load, full)


async def _list_ranges(load: GetLoad, full: Any) -> list[ObjectRange]:
    listed = [await full.head_object(Bucket=BUCKET, Key=sample_name(number)) for number in range(load.files)]
    return list(_ranges(load, [response["ETag"].strip('"') for response in listed]))


def _ranges(load: GetLoad, etags: list[str]) -> Iterator[ObjectRange]:
    for number in range(load.count):
        turn, which = divmod(number, load.files)
        offset = turn * load.size % load.object_size
        key = sample_name(which).encode()
        yield ObjectRange(key, etags[which].encode(), load.object_size, offset, load.size)


async def _measure_cost(load: GetLoad, get: Get, wanted: list[ObjectRange]) -> GetCost:
    before = _peak()
    await _get_all(get, wanted[: 2 * load.concurrency], load)
    wall, cpu = time.perf_counter(), time.process_time()
    await _get_all(get, wanted, load)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return GetCost(cpu / len(wanted), len(wanted) / wall, _peak() - before)


def _peak() -> int:
    """Return the peak resident bytes of the process. getrusage would include the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def _get_all(get: Get, wanted: list[ObjectRange], load: GetLoad) -> None:
    remaining = iter(wanted)

    async def worker() -> None:
        for one in remaining:
            assert await get(one) >= load.size

    await asyncio.gather(*(worker() for _ in range(load.concurrency)))


def _botocore(load: GetLoad) -> Any:
    config = AioConfig(
        signature_version="s3v4",
        s3={"addressing_style": "path"}, max_pool_connections=load.concurrency, retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )  # fmt: skip
    return get_session().create_client("s3", endpoint_url=load.server.endpoint, region_name="us-east-1", config=config)


@asynccontextmanager
async def _through_aiobotocore(load: GetLoad, full: Any, wanted: list[ObjectRange]) -> AsyncIterator[Get]:
    async def get(one: ObjectRange) -> int:
        part = {"Range": f"bytes={_span(one)}"} if one.length < one.size else {}
        response = await full.get_object(
            Bucket=BUCKET, Key=one.key.decode(), IfMatch=f'"{one.version.decode()}"', **part
        )
        async with response["Body"] as body:
            return len(await body.read())

    yield get


@asynccontextmanager
async def _through_origin(load: GetLoad, full: Any, wanted: list[ObjectRange]) -> AsyncIterator[Get]:
    """Read through the daemon's origin, with checks, retries and deadlines."""
    options = OriginOptions(endpoint_url=load.server.endpoint, region="us-east-1")
    origin = open_origin(f"s3://{BUCKET}", options, OriginSettings(max_connections=load.concurrency))

    async def get(one: ObjectRange) -> int:
        return len(await origin.read(one, Deadline.after(_DEADLINE)))

    try:
        yield get
        if origin.fallback_reads:
            raise CachefsError(f"{origin.fallback_reads} of the GETs went through aiobotocore after all; see the log")
    finally:
        await origin.close()


@asynccontextmanager
async def _through_raw(load: GetLoad, full: Any, wanted: list[ObjectRange]) -> AsyncIterator[Get]:
    """Read with the raw client; URLs are signed before the measurement."""
    urls = {
        key: await full.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key.decode()})
        for key in {one.key for one in wanted}
    }
    client = RawClient()

    async def get(one: ObjectRange) -> int:
        return await client.get_url(urls[one.key], one.length, _span(one) if one.length < one.size else "")

    yield get


def _span(one: ObjectRange) -> str:
    return f"{one.offset}-{one.offset + one.length - 1}"


_OPENERS: Final = {"raw": _through_raw, "cachefs": _through_origin, "aiobotocore": _through_aiobotocore}
