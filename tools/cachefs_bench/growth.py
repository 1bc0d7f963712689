"""Measures the computations of a node of a large cluster (placement, copies and duties), with simulated peers.

All nodes read one dataset that a DistributedSampler divides among them. Each node computes the holders of all blocks,
so one node's cost is every node's cost. Nothing is sent; the number of messages between nodes follows from the poll
intervals.
"""

import dataclasses
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from xxhash import xxh3_64_intdigest

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.copies import capacity_by_node, epochs_ahead
from cachefs.planning.cluster.epoch_reads import FirstReads, RemoteEpochReads, ScheduledReads
from cachefs.planning.cluster.homes import BlockHomes
from cachefs.planning.cluster.moves import next_holders
from cachefs.planning.cluster.ownership import owned_now
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits
from cachefs.planning.cluster.scale import local_share
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs_cluster.membership.ring import Ring, RingPlanner, decode_ring
from cachefs_cluster.membership.store import RECORD_SECONDS
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.sharing.state import MAX_FOLLOWED
from cachefs_cluster.sharing.wire import PROGRESS_SECONDS, poll_seconds

BLOCK_BYTES: Final = 110_000
# Room of all nodes together, in datasets.
CAPACITY_DATASETS: Final = 1.05
ME: Final = 1

Seconds = dict[str, list[float]]


def measure(blocks: int, nodes: int, epochs: int) -> dict[str, Any]:
    """Return the figures of one run, by name. Processor time is that of one node."""
    before = _peak()
    seconds: Seconds = defaultdict(list)
    homes = BlockHomes(mix_bits(np.arange(1, blocks + 1, dtype=np.uint64)))
    members = [_member(number) for number in range(nodes)]
    with _time_block(seconds, "first look"):
        homes.set_members(members)
    with _time_block(seconds, "leave"):
        left = len(homes.set_members(members[:-1]))
    with _time_block(seconds, "join"):
        joined = len(homes.set_members(members))
    counts = np.bincount(homes.first, minlength=nodes)
    placed = _peak()
    local = _run_decisions(homes, epochs, seconds)
    ahead = epochs_ahead(nodes)
    each = {what: _ms(times) for what, times in seconds.items() if what not in ("first look", "leave", "join")}
    return {
        "nodes": nodes,
        "blocks": blocks,
        "placement": {
            "first_look_ms": _ms(seconds["first look"]),
            "join_ms": _ms(seconds["join"]),
            "leave_ms": _ms(seconds["leave"]),
            "moved_by_join": round(joined / blocks * nodes, 3),
            "moved_by_leave": round(left / blocks * nodes, 3),
            "largest_share": round(float(counts.max() / counts.mean()), 3),
        },
        "epochs_ahead": ahead,
        "cpu_ms_per_node_and_epoch": {**each, "all": round(sum(each.values()), 1)},
        # Local reads grow from 1 / nodes, epoch by epoch.
        "local_reads_in_last_epoch": round(local, 4),
        "local_reads_in_theory": round(local_share(nodes), 4),
        "peak_mb": {"placement": placed - before, "all": _peak() - before},
        "ring": _ring_figures(nodes),
        "messages_per_second_and_node": _message_rates(nodes),
    }


def _run_decisions(homes: BlockHomes, epochs: int, seconds: Seconds) -> float:
    """Decide *epochs* epochs. Returns the share of local reads in the last one."""
    blocks, nodes = len(homes.first), len(homes.members)
    sizes = np.full(blocks, BLOCK_BYTES, np.uint32)
    room = capacity_by_node(np.full(nodes, int(CAPACITY_DATASETS * blocks * BLOCK_BYTES / nodes), np.int64), sizes)
    holders, local = homes.first, 0.0
    known = [
        FirstReads.of(blocks, _node_orders(blocks, nodes, epoch)).without_positions()
        for epoch in range(epochs_ahead(nodes))
    ]
    for epoch in range(epochs):
        with _time_block(seconds, "order"):
            orders = _node_orders(blocks, nodes, epoch + len(known))
        with _time_block(seconds, "reads"):
            known.append(FirstReads.of(blocks, orders).without_positions())
        now = FirstReads.of(blocks, _node_orders(blocks, nodes, epoch))
        local = float((holders == now.reader).mean())
        with _time_block(seconds, "copies"):
            scheduled = [ScheduledReads(one, float(number), 1.0) for number, one in enumerate([now, *known[1:]])]
            moves = next_holders(holders, scheduled, room, sizes)
        orders = _node_orders(blocks, nodes, epoch)
        with _time_block(seconds, "duty"):
            RemoteEpochReads.of(orders, holders == ME, ME)
        with _time_block(seconds, "what is mine"):
            owned_now(holders, moves, np.full(nodes, 0.5), ME)
        holders, known = moves.following, known[1:]
    return local


def _node_orders(blocks: int, nodes: int, epoch: int) -> list[tuple[int, Ids]]:
    """Return the reads of each node in an epoch, in order. All ranks share one permutation, which is computed once."""
    order = epoch_order(SamplerSpec(kind="torch-distributed", size=blocks, epochs=epoch + 1), epoch).astype(np.int32)
    return [(node, np.ascontiguousarray(order[node::nodes])) for node in range(nodes)]


def _member(number: int) -> RingMember:
    name = f"{xxh3_64_intdigest(number.to_bytes(8, 'big')):016x}"
    return RingMember(name, xxh3_64_intdigest(name.encode()), 1.0)


def _ring_figures(nodes: int) -> dict[str, float]:
    """Measure how a node learns of a change of the members, from a ring kept in etcd."""
    records = tuple(
        NodeRecord(
            id=_member(number).id, incarnation=f"{number:016x}", name=f"node-{number:04}.cluster", host="10.0.0.1",
            data_port=7380, control_port=7381, zone=f"rack-{number % 40}", weight=512.0, memory=64 << 30, ssd=1 << 40,
        )
        for number in range(nodes)
    )  # fmt: skip
    text = Ring(1, records).encode()
    seconds: Seconds = defaultdict(list)
    with _time_block(seconds, "read"):
        ring = decode_ring(text, 1)
    active = {record.id: dataclasses.replace(record, state="active") for record in records}
    with _time_block(seconds, "view"):
        roster = RingPlanner(records[ME].id, grace=30.0)
        roster.update(active, ring, now=0.0)
        roster.wanted_nodes(now=0.0)
        roster.make_view("etcd", "")
    return {"kilobytes": round(len(text) / 1000, 1), "read_ms": _ms(seconds["read"]), "view_ms": _ms(seconds["view"])}


def _message_rates(nodes: int) -> dict[str, float]:
    """Return the requests per second that a node sends and answers: while idle, and in addition while all nodes read a
    job."""
    others = nodes - 1
    followed = min(others, MAX_FOLLOWED)
    return {
        "nothing_happens": round(2 * others / poll_seconds(nodes), 2),
        "to_etcd": round(2 / (RECORD_SECONDS / 3), 2),  # lease renewals and the watch
        "a_job_reads": round(2 * followed / PROGRESS_SECONDS, 2),
    }


@contextmanager
def _time_block(seconds: Seconds, what: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    seconds[what].append(time.process_time() - begin)


def _ms(times: list[float]) -> float:
    return round(1e3 * float(np.median(times)), 1)


def _peak() -> int:
    """Return the peak resident megabytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
