"""Small clusters for tests of scheduling decisions."""

from typing import Any

import numpy as np

from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.facts import SHARDS, JobRequest, Links, NodeCopy, NodeFacts, SnapshotFacts

GB = 10**9
SIZE = 100 * GB


def copy_of(first: float, last: float, size: int = SIZE, **more: Any) -> NodeCopy:
    """The blocks from this part of the snapshot to that one, on SSD."""
    shards = np.zeros(SHARDS, np.uint8)
    shards[round(first * SHARDS) : round(last * SHARDS)] = 255
    return NodeCopy(0, round((last - first) * size), shards, **more)


def node(name: str, part: tuple[float, float] | None = None, **more: Any) -> NodeFacts:
    """A node with 400 GB, 10 Gbit/s, 200 MB/s from the origin; it has this part of the snapshot."""
    copies = {} if part is None else {"s": copy_of(*part)}
    facts: dict[str, Any] = {
        "capacity": 400 * GB,
        "origin_rate": 2e8,
        "peer_rate": 1.25e9,
        "tier_rate": 2e9,
        "used": sum(copy.bytes for copy in copies.values()),
        "copies": copies,
    }
    return NodeFacts(name, **(facts | more))


def cluster_of(*nodes: NodeFacts, links: Links | None = None, size: int = SIZE, now: float = 0.0) -> ClusterFacts:
    cluster = ClusterFacts(links)
    cluster.add_snapshot(SnapshotFacts("s", size, 1000))
    for one in nodes:
        cluster.update_node(one, now)
    return cluster


def job(ranks: int = 1, **more: Any) -> JobRequest:
    return JobRequest(more.pop("id", "job"), "s", ranks, **({"rate": 4e8, "epochs": 10} | more))
