"""Measures a GET of the daemon's own client, next to aiobotocore and to the least that a Python client can do.

Each client runs in turns in a process of its own, on one event loop, with a fixed number of concurrent requests.
"""

import asyncio
import os
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
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, open_origin
from cachefs_daemon.origin.patience import Patience

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs_tools.bench.origin_server import BUCKET, OriginServer, filled_server
from cachefs_tools.bench.own_process import in_own_process
from cachefs_tools.bench.raw_client import RawClient
from cachefs_tools.bench.scenario import Shape
from cachefs_tools.bench.static_server import find_nginx, static_server
from cachefs_tools.sample_data import sample_name, write_samples
from cachefs_tools.scratch_node import SCRATCH

SMALL: Final = 110 << 10
RANGE: Final = 4 << 20
# Bytes of the object that is read in ranges.
LARGE: Final = 64 << 20
# GETs through aiobotocore are fewer by this factor, since each takes much longer.
_FEWER: Final = 5
_DEADLINE: Final = 60.0
CLIENTS: Final = ("raw", "cachefs", "aiobotocore")


@dataclass(frozen=True, slots=True)
class Load:
    """The objects to read."""

    server: OriginServer
    # Bytes of each GET.
    size: int
    # Objects of the server, and bytes of each. Objects larger than a GET are read in ranges.
    files: int
    whole: int
    # GETs of each client in each turn.
    count: int
    # Concurrent GETs.
    parallel: int


@dataclass(frozen=True, slots=True)
class Cost:
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
    shapes = {"objects": Shape(files=256, size=size), "ranges": Shape(files=1, size=LARGE)}
    for name, shape in shapes.items():
        directory = work / name
        directory.mkdir()
        with filled(directory, shape, endpoint) as (kind, server):
            bytes_each = min(shape.size, RANGE)
            count = max(2 * parallel, gets // max(1, bytes_each // SMALL // 2))
            load = Load(server, bytes_each, shape.files, shape.size, count, parallel)
            found["server"] = kind
            found[name] = {"bytes": bytes_each, "gets": count, **_compare(load, turns)}
    return found


@contextmanager
def filled(work: Path, shape: Shape, endpoint: str | None) -> Iterator[tuple[str, OriginServer]]:
    """Yield the kind of server, and the server filled with the dataset. endpoint: of a running server."""
    nginx = find_nginx()
    if endpoint is None and nginx is not None:
        write_samples(work / "buckets" / BUCKET, shape.files, shape.size)
        with static_server(nginx, work / "buckets", work / "nginx") as own:
            yield "nginx", OriginServer(own, SCRATCH)
    else:
        with filled_server(work, shape, endpoint) as server:
            yield endpoint or "rclone", server


def _compare(load: Load, turns: int) -> dict[str, Any]:
    costs: dict[str, list[Cost]] = {client: [] for client in CLIENTS}
    for turn in range(turns):
        for client in CLIENTS:
            click.echo(
                f"turn {turn + 1} of {turns}: {load.count:,} GETs of {load.size:,} bytes by {client} ...", err=True
            )
            costs[client].append(in_own_process(_turn, client, load))
    figures = {client: _figures(of_client, load.size) for client, of_client in costs.items()}
    return {**figures, **_ratios(costs, "aiobotocore"), **_ratios(costs, "raw")}


def _ratios(costs: dict[str, list[Cost]], other: str) -> dict[str, float]:
    """Return the medians of our figures relative to another client's, per turn, since a machine's load varies between
    turns."""
    turns = list(zip(costs["cachefs"], costs[other], strict=True))
    return {
        f"cpu_to_{other}": round(statistics.median(ours.cpu / theirs.cpu for ours, theirs in turns), 3),
        f"rate_to_{other}": round(statistics.median(ours.rate / theirs.rate for ours, theirs in turns), 2),
    }


def _figures(costs: list[Cost], size: int) -> dict[str, Any]:
    rate = statistics.median(cost.rate for cost in costs)
    return {
        "cpu_us": round(1e6 * statistics.median(cost.cpu for cost in costs), 1),
        "per_second": round(rate, 1),
        "gb_per_second": round(rate * size / 1e9, 3),
        "grew_mb": round(max(cost.memory for cost in costs) / 1e6, 1),
    }


def _turn(client: str, load: Load) -> Cost:
    return asyncio.run(_run(client, load))


async def _run(client: str, load: Load) -> Cost:
    # aiobotocore and the daemon read them from there.
    os.environ.update(
        AWS_ACCESS_KEY_ID=load.server.account.access_key, AWS_SECRET_ACCESS_KEY=load.server.account.secret_key
    )
    async with _botocore(load) as full:
        wanted = await _gets_of(load, full)
        async with _CONNECTED[client](load, full, wanted) as get:
            return await _cost(load, get, wanted[: load.count // _FEWER] if client == "aiobotocore" else wanted)


async def gets_of(load: Load) -> list[ObjectRange]:
    """Return all ranges to read. Asks the server for ETags."""
    async with _botocore(load) as full:
        return await _gets_of(load, full)


async def _gets_of(load: Load, full: Any) -> list[ObjectRange]:
    listed = [await full.head_object(Bucket=BUCKET, Key=sample_name(number)) for number in range(load.files)]
    return list(_wanted(load, [answer["ETag"].strip('"') for answer in listed]))


def _wanted(load: Load, etags: list[str]) -> Iterator[ObjectRange]:
    for number in range(load.count):
        turn, which = divmod(number, load.files)
        offset = turn * load.size % load.whole
        key = sample_name(which).encode()
        yield ObjectRange(key, etags[which].encode(), load.whole, offset, load.size)


async def _cost(load: Load, get: Get, wanted: list[ObjectRange]) -> Cost:
    before = _peak()
    await _all(get, wanted[: 2 * load.parallel], load)
    wall, cpu = time.perf_counter(), time.process_time()
    await _all(get, wanted, load)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(cpu / len(wanted), len(wanted) / wall, _peak() - before)


def _peak() -> int:
    """Return the peak resident bytes of the process. getrusage would include the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def _all(get: Get, wanted: list[ObjectRange], load: Load) -> None:
    rest = iter(wanted)

    async def worker() -> None:
        for one in rest:
            assert await get(one) >= load.size

    await asyncio.gather(*(worker() for _ in range(load.parallel)))


def _botocore(load: Load) -> Any:
    config = AioConfig(
        signature_version="s3v4",
        s3={"addressing_style": "path"}, max_pool_connections=load.parallel, retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )  # fmt: skip
    return get_session().create_client("s3", endpoint_url=load.server.endpoint, region_name="us-east-1", config=config)


@asynccontextmanager
async def _through_aiobotocore(load: Load, full: Any, wanted: list[ObjectRange]) -> AsyncIterator[Get]:
    async def get(one: ObjectRange) -> int:
        part = {"Range": f"bytes={_span(one)}"} if one.length < one.size else {}
        answer = await full.get_object(Bucket=BUCKET, Key=one.key.decode(), IfMatch=f'"{one.version.decode()}"', **part)
        async with answer["Body"] as body:
            return len(await body.read())

    yield get


@asynccontextmanager
async def _through_origin(load: Load, full: Any, wanted: list[ObjectRange]) -> AsyncIterator[Get]:
    """Read through the daemon's origin, with checks, retries and deadlines."""
    options = OriginOptions(endpoint_url=load.server.endpoint, region="us-east-1")
    origin = open_origin(f"s3://{BUCKET}", options, OriginSettings(max_connections=load.parallel))

    async def get(one: ObjectRange) -> int:
        return len(await origin.read(one, Patience.of(_DEADLINE)))

    try:
        yield get
        if origin.detours:
            raise CachefsError(f"{origin.detours} of the GETs went through aiobotocore after all; see the log")
    finally:
        await origin.close()


@asynccontextmanager
async def _through_raw(load: Load, full: Any, wanted: list[ObjectRange]) -> AsyncIterator[Get]:
    """Read with the raw client; URLs are signed before the measurement."""
    urls = {
        key: await full.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key.decode()})
        for key in {one.key for one in wanted}
    }
    client = RawClient()

    async def get(one: ObjectRange) -> int:
        return await client.get(urls[one.key], one.length, _span(one) if one.length < one.size else "")

    yield get


def _span(one: ObjectRange) -> str:
    return f"{one.offset}-{one.offset + one.length - 1}"


_CONNECTED: Final = {"raw": _through_raw, "cachefs": _through_origin, "aiobotocore": _through_aiobotocore}
