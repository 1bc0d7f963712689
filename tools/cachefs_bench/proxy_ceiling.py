"""Measures the throttling proxy without limits.

A benchmark compares this with the rate that the proxy let through: if the two are close, the benchmark measured the
proxy.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.session import Session

from cachefs_bench.lab.scratch_node import S3Credentials
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle

CONNECTIONS: Final = 16
SECONDS: Final = 2.0


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
    places = (path.split("/", 1) for path in paths)
    return [client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}) for bucket, key in places]


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
