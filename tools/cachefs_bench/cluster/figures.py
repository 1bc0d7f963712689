"""Results of a scenario as JSON-serialisable documents, and the checks of their bounds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from cachefs_bench.cluster.run import ClusterLoad
from cachefs_bench.lab.counters import ClusterCounters
from cachefs_bench.lab.reader import EpochResult, ReadProblem


class BoundCheck(TypedDict):
    """A figure with its bound."""

    what: str
    value: float
    least: float | None  # None: no such bound
    most: float | None
    met: bool


def check_at_most(what: str, value: float, most: float) -> BoundCheck:
    return BoundCheck(what=what, value=value, least=None, most=most, met=value <= most)


def check_at_least(what: str, value: float, least: float) -> BoundCheck:
    return BoundCheck(what=what, value=value, least=least, most=None, met=value >= least)


def document(scenario: str, load: ClusterLoad, checks: Sequence[BoundCheck], **parts: Any) -> dict[str, Any]:
    """Return the document that `cachefs-bench cluster` prints."""
    return {
        "scenario": scenario,
        "load": asdict(load),
        "held_by_node": load.held,
        "checks": list(checks),
        "met": all(check["met"] for check in checks),
        **parts,
    }


def epoch_document(
    load: ClusterLoad, number: int, grown: ClusterCounters, results: Iterable[EpochResult]
) -> dict[str, Any]:
    """Return the document of one epoch of one job. grown: growth of the counters during the epoch."""
    total, mine = grown.total, [result for result in results if result.epoch == number]
    reads = sum(result.reads for result in mine)
    return {
        "epoch": number + 1,
        "seconds": round(grown.when, 2),
        "origin_bytes_of_dataset": grown.origin_bytes / load.bytes,
        "origin_requests": grown.origin_requests,
        "peer_bytes_of_dataset": total.peer_bytes / load.bytes,
        "local_share": local_share(grown, reads),
        "waited_share": total.stalls / reads if reads else 0.0,
        "waited_for_peer_share": total.stalls_peer / reads if reads else 0.0,
        **read_document(mine),
    }


def read_document(results: Iterable[EpochResult]) -> dict[str, Any]:
    """Return the document of reads. Times in milliseconds; percentiles are the worst of all ranks and epochs."""
    found = list(results)
    return {
        "reads": sum(result.reads for result in found),
        "errors": sum(result.errors for result in found),
        "wrong": sum(result.wrong for result in found),
        "slow": sum(result.slow for result in found),
        "p50_ms": 1e3 * max((result.p50 for result in found), default=0.0),
        "p99_ms": 1e3 * max((result.p99 for result in found), default=0.0),
        "longest_ms": 1e3 * max((result.longest for result in found), default=0.0),
    }


def problem_document(troubles: Iterable[ReadProblem], since: float) -> dict[str, Any]:
    """Return the document of slow and failed reads since a moment, with the first words of each kind of error."""
    found = [trouble for trouble in troubles if trouble.when + trouble.seconds >= since]
    return {
        "errors": sum(trouble.kind == "error" for trouble in found),
        "wrong": sum(trouble.kind == "wrong" for trouble in found),
        "long": sum(trouble.kind == "long" for trouble in found),
        "longest_s": max((trouble.seconds for trouble in found), default=0.0),
        "reasons": sorted({trouble.reason for trouble in found if trouble.reason}),
    }


def local_share(grown: ClusterCounters, reads: int) -> float:
    """Return the share of reads whose block came neither from another node nor from the origin."""
    if not reads:
        return math.nan
    return max(0.0, 1 - (grown.total.peer_blocks + grown.origin_requests) / reads)
