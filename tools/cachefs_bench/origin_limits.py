"""Measures the daemon's reads from a server that throttles, and from one that is slow now and then.

The reads go through the daemon's slots and its client, on one event loop, to a proxy in front of the server.
"""

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from cachefs.errors import CachefsError, ConfigError
from cachefs.messages import OriginOptions
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import run_throttle
from cachefs_bench.origin_get import GetLoad, list_ranges, run_bench_server
from cachefs_bench.origin_server import BUCKET
from cachefs_bench.own_process import in_own_process
from cachefs_bench.scenario import DatasetShape
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin

FILES: Final = 256
# Seconds of a normal request if some are slow; and the deadline of a read.
_LATENCY: Final = 0.05
_DEADLINE: Final = 60.0
_SLOW: Final = re.compile(r"(0?\.\d+)x(\d+)")


def measure(
    work: Path, endpoint: str | None, gets: int, size: int, parallel: int, limits: LinkLimits
) -> dict[str, Any]:
    """Return the figures. endpoint: of a running S3 server; None: one is started. size: bytes of an object."""
    work = work / "limits"
    work.mkdir()
    with run_bench_server(work, DatasetShape(files=FILES, size=size), endpoint) as (kind, server):
        found: dict[str, Any] = {"server": kind, "gets": gets, "bytes": size, "parallel": parallel}
        load = GetLoad(server, size, FILES, size, gets, parallel)
        variants = {"hedged": 0.02, "unhedged": 0.0} if limits.slow_share else {"reads": 0.02}
        for variant, share in variants.items():
            click.echo(f"{variant}: {gets:,} GETs of {size:,} bytes ...", err=True)
            with run_throttle(server.endpoint, limits, work / "proxy.log") as proxy:
                found[variant] = in_own_process(run_reads, load, proxy.endpoint, share)
                counted = proxy.read_counters()
                found[variant]["extra_requests"] = round(counted.requests / gets - 1, 4)
            if limits.request_rate:
                found[variant]["goodput_to_limit"] = round(found[variant]["per_second"] / limits.request_rate, 3)
        return found


def parse_slow(text: str) -> tuple[float, float]:
    """Parse the share and factor of slow requests, such as 0.01x50. Raises ConfigError."""
    match = _SLOW.fullmatch(text)
    if match is None:
        raise ConfigError(f"--slow {text}: expected a share and a factor, as in 0.01x50")
    return float(match[1]), float(match[2])


def proxy_limits(throttle: float, slow: str | None) -> LinkLimits:
    """Return the limits of the proxy. Raises ConfigError."""
    if slow is None:
        return LinkLimits(request_rate=throttle)
    share, factor = parse_slow(slow)
    return LinkLimits(latency=_LATENCY, request_rate=throttle, slow_share=share, slow_factor=factor)


def run_reads(load: GetLoad, endpoint: str, hedge_share: float) -> dict[str, Any]:
    """Make all reads of *load* through the proxy at *endpoint*."""
    os.environ.update(
        AWS_ACCESS_KEY_ID=load.server.credentials.access_key, AWS_SECRET_ACCESS_KEY=load.server.credentials.secret_key
    )
    return asyncio.run(_read_all(load, endpoint, hedge_share))


async def _read_all(load: GetLoad, endpoint: str, hedge_share: float) -> dict[str, Any]:
    wanted = await list_ranges(load)
    options = OriginOptions(endpoint_url=endpoint, region="us-east-1")
    origin = open_origin(f"s3://{BUCKET}", options, OriginSettings(hedge_share=hedge_share))
    limiter = ConcurrencyLimiter(load.concurrency, 1 << 30)
    remaining = iter(range(load.count))
    seconds: list[float] = []
    errors: list[str] = []

    async def worker() -> None:
        for number in remaining:
            began = time.perf_counter()
            try:
                await _read(origin, limiter, wanted[number], number)
            except CachefsError as error:
                errors.append(str(error))
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    wall = time.perf_counter() - began
    status = origin.endpoint.status()
    await origin.close()
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {
        "per_second": round(load.count / wall, 1),
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
        "p50_ms": round(1e3 * p50, 2),
        "p99_ms": round(1e3 * p99, 2),
        "p99_to_p50": round(p99 / p50, 2),
        "throttled": status.throttled,
        "hedged": status.hedged,
        "hedges_won": status.hedges_won,
        "width": status.width,
        "rate": round(status.rate, 1),
    }


async def _read(origin: Origin, limiter: ConcurrencyLimiter, wanted: ObjectRange, number: int) -> None:
    """Read like the daemon's Fetcher."""
    async with limiter.new_permit(number.to_bytes(8, "big"), wanted.length, origin.endpoint, ahead=False) as permit:

        async def pause(seconds: float) -> None:
            permit.release()
            await asyncio.sleep(seconds)
            await permit.acquire(ahead=False)

        patience = Deadline.after(_DEADLINE)
        patience.pause = pause
        data = await origin.read(wanted, patience)
        assert len(data) == wanted.length
