"""Computes how many nodes the published jobs need, as a hint for scaling the cluster."""

import math
from collections.abc import Sequence

import numpy as np

from cachefs.cluster_messages import ScaleNode, ScaleOutcome, ScaleStatus
from cachefs.planning.cluster.scale import ScaleForecast, SnapshotDemand, scale_hint
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import UNKNOWN_READ


def scale_status(nodes: Sequence[ScaleNode], demands: Sequence[SnapshotDemand]) -> ScaleStatus:
    """Return the scale status of these nodes. A node of unknown capacity counts as average."""
    known = [node.capacity for node in nodes if node.capacity]
    average = sum(known) // len(known) if known else 0
    hint = scale_hint([node.capacity or average for node in nodes], demands)
    return ScaleStatus(
        nodes=list(nodes),
        needed=hint.needed,
        snapshots=sum(1 for demand in demands if demand.bytes),
        nodes_needed=hint.nodes_needed,
        now=_outcome_message(hint.now),
        one_more=_outcome_message(hint.one_more),
        one_fewer=_outcome_message(hint.one_fewer) if hint.one_fewer is not None else None,
    )


def planned_demands(plan: Plan) -> list[SnapshotDemand]:
    """Return the demands of this node's consumers, one per snapshot, for an unknown number of epochs."""
    read: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    seconds: dict[str, float] = {}
    for consumer in plan.consumers():
        snapshot, _ = plan.generation(consumer)
        epoch, window = plan.epoch(consumer, plan.progress(consumer)[0]), plan.window(consumer, 0, 1)
        space = plan.spaces.get(snapshot)
        if epoch is None or space is None:
            continue
        marks = read.setdefault(snapshot, np.zeros(space.count, np.bool_))
        marks |= epoch.first != UNKNOWN_READ
        if window is not None:
            seconds[snapshot] = min(seconds.get(snapshot, math.inf), window.period * len(epoch.blocks))
    return [
        SnapshotDemand(
            int(plan.spaces[snapshot].sizes[marks].sum(dtype=np.int64)), math.inf, seconds.get(snapshot, 0.0)
        )
        for snapshot, marks in read.items()
    ]


def _outcome_message(outcome: ScaleForecast) -> ScaleOutcome:
    return ScaleOutcome(
        nodes=outcome.nodes,
        capacity=outcome.capacity,
        kept=outcome.kept,
        origin_bytes=outcome.origin_bytes if math.isfinite(outcome.origin_bytes) else None,
        origin_rate=outcome.origin_rate,
        peer_rate=outcome.peer_rate,
    )
