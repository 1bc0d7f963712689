"""Explains in text, and as a table, why one node is better than another for a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster_facts import GRACE_SECONDS, ClusterFacts
from cachefs.planning.scheduling.copies import cached_copies
from cachefs.planning.scheduling.estimates import estimates, score_nodes
from cachefs.planning.scheduling.facts import Estimate, JobRequest

# Most rows of a table.
MAX_ROWS: Final = 1000
# Difference of scores below which two count as equal for a reader.
_EQUAL_SCORES: Final = 0.02


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node in the table, best first."""

    node: str
    score: float
    estimate: Estimate
    # "up", "draining", "away", or "unknown": no report yet.
    state: str
    # Seconds since its report; inf without one.
    age: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for a choice of nodes."""

    # Sentences.
    text: tuple[str, ...]
    rows: tuple[NodeRow, ...]


def explain_ranking(
    job: JobRequest, candidates: Sequence[str], cluster: ClusterFacts, placed: Sequence[str] = (), max_nodes: int = 10
) -> Explanation:
    """Explain the best *max_nodes* candidates, and those on which the job is *placed*."""
    names = list(dict.fromkeys((*candidates, *placed)))
    snapshot = cluster.snapshot_facts(job.snapshot)
    if not names or snapshot is None:
        nothing = "No node is known." if snapshot else f"No node has reported snapshot {job.snapshot} yet."
        return Explanation((f"{nothing} The scheduler decides as it would without hints.",), ())
    scores, found = score_nodes(job, names, cluster), estimates(job, names, cluster)
    order = np.argsort(-scores, kind="stable").tolist()
    shown, is_placed = order[: min(max_nodes, MAX_ROWS)], set(placed)
    shown += [position for position in order[len(shown) :] if names[position] in is_placed][:MAX_ROWS]
    rows = []
    for position in shown:
        facts = cluster.current_facts(names[position])
        state, age = (facts.state, facts.age) if facts else ("unknown", np.inf)
        rows.append(NodeRow(names[position], float(scores[position]), found.estimate_of(position), state, age))
    text = [
        _holders_sentence(job, snapshot.bytes, cluster),
        _best_node_sentence(rows[0], found.epoch, scores, len(names)),
    ]
    text += [_placed_sentence(row, rows[0]) for row in rows if row.node in is_placed]
    text += [_silence_sentence(row) for row in rows if row.estimate.trust < 1]
    return Explanation(tuple(text), tuple(rows))


def _holders_sentence(job: JobRequest, size: int, cluster: ClusterFacts) -> str:
    copies = cached_copies(job.snapshot, cluster)
    holders = len(cluster.holders(job.snapshot))
    if not holders:
        return f"No node has any of the {_bytes(size)}: the first epoch reads all of it from the origin."
    reading = len(cluster.jobs_on(job.snapshot))
    times = {0: "a part of the", 1: "the"}.get(len(copies), f"{len(copies)} copies of the")
    jobs = f"Jobs read it on {_nodes(reading)} now." if reading else "No job reads it now."
    return f"{_nodes(holders)} {'has' if holders == 1 else 'have'} {times} {_bytes(size)}. {jobs}"


def _best_node_sentence(
    row: NodeRow, epoch: float, scores: "np.ndarray[tuple[int], np.dtype[np.float64]]", count: int
) -> str:
    alike = int(np.count_nonzero(scores >= scores.max() - _EQUAL_SCORES))
    if alike == count > 1:
        return f"All {count:,} candidates are about as good: {_wait_sentence(row.estimate, epoch)}"
    others = f" (as {alike - 1:,} more {'is' if alike == 2 else 'are'}, nearly)" if alike > 1 else ""
    return f"{row.node} is best{others}: {_wait_sentence(row.estimate, epoch)}"


def _wait_sentence(estimate: Estimate, epoch: float) -> str:
    sources = (("there", estimate.local), ("in its zone", estimate.zone), ("in its region", estimate.region))
    parts = [f"{_bytes(size)} {where}" for where, size in (*sources, ("on other nodes", estimate.elsewhere)) if size]
    if estimate.origin:
        parts.append(f"{_bytes(estimate.origin)} at the origin")
    read = f"of what a rank reads, {', '.join(parts)}. " if parts else ""
    length = f" of {_seconds(epoch)}" if epoch else ""
    first, later = _seconds(estimate.first), _seconds(estimate.later)
    return f"{read}It waits {first} in the first epoch{length}, and {later} in each later one."


def _placed_sentence(row: NodeRow, best: NodeRow) -> str:
    if row.state != "up":
        return f"The job is on {row.node}, which is {row.state}, and so no candidate."
    if row.node == best.node or row.score >= best.score - _EQUAL_SCORES:
        return f"The job is on {row.node}, which is one of the best nodes."
    slower = 100 * (1 / max(row.score, 0.01) - 1)
    return f"The job is on {row.node}, where it takes {slower:.0f} % longer than on {best.node}."


def _silence_sentence(row: NodeRow) -> str:
    if row.state == "unknown":
        return f"{row.node} has not reported yet: it counts as a node without data."
    if row.state == "away":
        return f"{row.node} is away: its data do not count."
    counted = f"counts {row.estimate.trust:.0%}" if row.estimate.trust else "no longer counts"
    more = "" if row.age > GRACE_SECONDS else ", and the node reports again"
    return f"{row.node} did not report for {_seconds(row.age)}: its last report {counted}{more}."


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count:,} nodes"


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} PB"


def _seconds(seconds: float) -> str:
    if seconds == np.inf:
        return "ever"
    if seconds < 0.05:
        return "0 s"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
