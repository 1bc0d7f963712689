"""Tests the origin of a dataset: response, speed, and the cause of a failure. Costs requests, so it runs on demand
only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.formatting import format_count
from cachefs.messages import OriginOptions
from cachefs.sizes import format_size
from cachefs_tools.doctor.finding import Finding, note, ok, problem, warning
from cachefs_tools.escaped_names import escape_name
from cachefs_tools.origin_speed import MeasurementBounds, OriginSpeed, measure_origin

# At most 20 requests and 17 MiB.
DEFAULT_BOUNDS: Final = MeasurementBounds(small=12, widths=(4,), large=8, large_bytes=2 << 20, seconds=20.0)
# Seconds of a small read above which one stream is slow, whatever the bandwidth.
_SLOW_SECONDS: Final = 0.5


class OriginQuery(msgspec.Struct, frozen=True):
    """The dataset to test."""

    dataset: str
    # Path of its snapshot file.
    snapshot: str
    options: OriginOptions
    # The daemon's timeouts in seconds.
    connect_timeout: float = 5.0
    read_timeout: float = 10.0
    look: MeasurementBounds = DEFAULT_BOUNDS


class OriginFacts(msgspec.Struct, frozen=True):
    """Facts about an origin."""

    dataset: str
    url: str = ""
    endpoint: str = ""
    speed: OriginSpeed = OriginSpeed()
    # Why the origin was not tested; empty if it was.
    error: str = ""


def gather(argument: object) -> OriginFacts:
    """Gather facts. argument: a Question."""
    from cachefs_daemon.origin.base import OriginSettings

    wanted = msgspec.convert(argument, OriginQuery)
    settings = OriginSettings(
        max_connections=max(wanted.look.widths),
        connect_timeout=wanted.connect_timeout,
        read_timeout=wanted.read_timeout,
        hedge_share=0.0,
    )
    try:
        speed = measure_origin(Path(wanted.snapshot), wanted.options, settings, wanted.look)
    except CachefsError as error:
        return OriginFacts(wanted.dataset, error=str(error))
    return OriginFacts(wanted.dataset, speed=speed)


def findings(facts: OriginFacts, whose: str) -> Iterator[Finding]:
    """Yield findings. whose: whose credentials were used, in words."""
    speed, dataset = facts.speed, f"dataset {escape_name(facts.dataset)}"
    if facts.error:
        yield note("origin.skipped", f"{dataset}: its origin was not asked: {escape_name(facts.error)}")
        return
    if speed.error:
        yield from _failure_findings(facts, whose)
        return
    if not speed.requests and not speed.bytes:
        yield note("origin.empty", f"{dataset} has no file with bytes in it, so its origin was not asked")
        return
    best = max((each.bytes for each in speed.throughput), default=0.0)
    text = (
        f"{dataset}: first byte to last of a small read {1e3 * speed.p50:.1f} ms (p99 {1e3 * speed.p99:.1f} ms), "
        f"{best / 1e6:,.0f} MB/s with {format_count(max(DEFAULT_BOUNDS.widths), 'request')} at once, asked {whose}: "
        f"{format_count(speed.requests, 'request')}, {format_size(speed.bytes)}"
    )
    if speed.p50 > _SLOW_SECONDS:
        yield warning(
            "origin.speed",
            text,
            "each read of an unpublished file waits this long",
            "publish the order of reading (cachefs run), and see cachectl bench",
        )
    else:
        yield ok("origin.speed", text)


def _failure_findings(facts: OriginFacts, whose: str) -> Iterator[Finding]:
    text = f"dataset {escape_name(facts.dataset)}, asked {whose}: {escape_name(facts.speed.message)}"
    waits = "blocks that are not cached cannot be read"
    match facts.speed.error:
        case "ObjectChanged":
            yield warning(
                "origin.changed",
                text,
                "reads of such objects fail with ESTALE",
                f"cachectl dataset refresh {escape_name(facts.dataset)}",
            )
        case "OriginAccessDenied":
            yield problem("origin.refused", text, waits, "see the finding about credentials, and the bucket's policy")
        case _ if "AWS_CA_BUNDLE" in text or "REQUESTS_CA_BUNDLE" in text:
            yield problem(
                "origin.tls",
                text,
                waits,
                "AWS_CA_BUNDLE=/path/authorities.pem in /etc/cachefs/cachefsd.env "
                "(s3://), REQUESTS_CA_BUNDLE for others; then restart the daemon",
            )
        case _:
            yield problem(
                "origin.unreachable",
                text,
                waits,
                "check endpoint, network and proxies from this machine: curl -v ENDPOINT",
            )
