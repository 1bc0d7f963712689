"""Counters of a cluster's nodes and its origin, at one moment or between two."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final

from cachefs.block import SSD, TIER_NAMES
from cachefs.errors import DaemonUnavailable
from cachefs.job_messages import JobName
from cachefs.messages import Empty
from cachefs.rpc import CLUSTER, STALL_LIST
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.throttle import Throttle

# Prefix of a stall's cause that was another node.
_PEER: Final = "peer"


@dataclass(frozen=True, slots=True)
class LabNodeCounters:
    """Counters of one node since its daemon started, or their growth."""

    hits_memory: int = 0  # reads of its mount
    hits_ssd: int = 0
    misses: int = 0
    peer_blocks: int = 0  # received from other nodes
    peer_bytes: int = 0
    given_blocks: int = 0  # sent to other nodes
    given_bytes: int = 0
    stalls: int = 0  # reads that waited
    stalls_peer: int = 0  # those that waited for another node
    given_fetched: int = 0  # those of the given blocks that were fetched from the origin for it
    filled: int = 0  # blocks received to fill the tier, without a reader

    def __sub__(self, before: "LabNodeCounters") -> "LabNodeCounters":
        return _combine(self, before, -1)

    def __add__(self, other: "LabNodeCounters") -> "LabNodeCounters":
        return _combine(self, other, 1)


@dataclass(frozen=True, slots=True)
class ClusterCounters:
    """The counters of all nodes, and of the origin."""

    when: float
    nodes: dict[str, LabNodeCounters]  # by name
    origin_bytes: int
    origin_requests: int

    def __sub__(self, before: "ClusterCounters") -> "ClusterCounters":
        grown = {
            name: counters - before.nodes[name] if name in before.nodes else counters
            for name, counters in self.nodes.items()
        }
        return ClusterCounters(
            self.when - before.when, grown, self.origin_bytes - before.origin_bytes,
            self.origin_requests - before.origin_requests,
        )  # fmt: skip

    @property
    def total(self) -> LabNodeCounters:
        return sum(self.nodes.values(), LabNodeCounters())


def read_counters(nodes: Iterable[LabNode], throttle: Throttle) -> ClusterCounters:
    """Return the present counters of the nodes that run and respond."""
    proxy = throttle.read_counters()
    found = {}
    for node in nodes:
        if node.is_running:
            try:
                found[node.name] = node_counters(node)
            except DaemonUnavailable:
                continue
    return ClusterCounters(time.monotonic(), found, proxy.bytes, proxy.requests)


def node_counters(node: LabNode) -> LabNodeCounters:
    """Return the counters of one node. Raises DaemonUnavailable."""
    status = node.status()
    mounts: Counter[str] = Counter()
    for mount in status.mounts:
        mounts.update(mount.counters)
    traffic = [member.traffic for member in node.client.call(CLUSTER, Empty(), timeout=10).members]
    stalls = node.client.call(STALL_LIST, JobName(job=""), timeout=10).rows
    return LabNodeCounters(
        mounts["hits_memory"], mounts["hits_ssd"], mounts["misses"],
        sum(one.blocks_in for one in traffic), sum(one.bytes_in for one in traffic),
        sum(one.blocks_out for one in traffic), sum(one.bytes_out for one in traffic),
        sum(row.count for row in stalls), sum(row.count for row in stalls if row.source.startswith(_PEER)),
        status.peers.served_fetched, status.peers.filled,
    )  # fmt: skip


def ssd_blocks(node: LabNode) -> int:
    """Return the number of blocks in the SSD tier of a node."""
    return sum(tier.blocks for tier in node.status().tiers if tier.name == TIER_NAMES[SSD])


def _combine(left: LabNodeCounters, right: LabNodeCounters, sign: int) -> LabNodeCounters:
    names: list[Any] = [one.name for one in fields(LabNodeCounters)]
    return LabNodeCounters(*(getattr(left, name) + sign * getattr(right, name) for name in names))
