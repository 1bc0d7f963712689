"""Explains in text, and as a table, why one node is better than another for a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster import GRACE, Cluster
from cachefs.planning.scheduling.copies import cached_copies
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import Estimate, JobAsk
from cachefs.planning.scheduling.scores import scores

# Most rows of a table.
MOST_ROWS: Final = 1000
# Difference of scores below which two count as equal for a reader.
_ALIKE: Final = 0.02


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


def explain(
    ask: JobAsk, candidates: Sequence[str], cluster: Cluster, placed: Sequence[str] = (), most: int = 10
) -> Explanation:
    """Explain the best *most* candidates, and those on which the job is *placed*."""
    names = list(dict.fromkeys((*candidates, *placed)))
    snapshot = cluster.snapshot(ask.snapshot)
    if not names or snapshot is None:
        nothing = "No node is known." if snapshot else f"Nothing is known of {ask.snapshot} yet."
        return Explanation((f"{nothing} The scheduler decides as it would without hints.",), ())
    given, found = scores(ask, names, cluster), estimates(ask, names, cluster)
    order = np.argsort(-given, kind="stable").tolist()
    shown, is_placed = order[: min(most, MOST_ROWS)], set(placed)
    shown += [place for place in order[len(shown) :] if names[place] in is_placed][:MOST_ROWS]
    rows = []
    for place in shown:
        facts = cluster.facts(names[place])
        state, age = (facts.state, facts.age) if facts else ("unknown", np.inf)
        rows.append(NodeRow(names[place], float(given[place]), found.one(place), state, age))
    text = [_where(ask, snapshot.bytes, cluster), _best(rows[0], found.epoch, given, len(names))]
    text += [_place(row, rows[0]) for row in rows if row.node in is_placed]
    text += [_silent(row) for row in rows if row.estimate.trust < 1]
    return Explanation(tuple(text), tuple(rows))


def _where(ask: JobAsk, size: int, cluster: Cluster) -> str:
    copies = cached_copies(ask.snapshot, cluster)
    holders = len(cluster.holders(ask.snapshot))
    if not holders:
        return f"No node has anything of the {_bytes(size)}: all of it comes from the origin in the first epoch."
    reading = len(cluster.jobs_on(ask.snapshot))
    times = {0: "a part of the", 1: "the"}.get(len(copies), f"{len(copies)} copies of the")
    jobs = f"Jobs read it on {_nodes(reading)} now." if reading else "No job reads it now."
    return f"{_nodes(holders)} {'has' if holders == 1 else 'have'} {times} {_bytes(size)}. {jobs}"


def _best(row: NodeRow, epoch: float, given: "np.ndarray[tuple[int], np.dtype[np.float64]]", count: int) -> str:
    alike = int(np.count_nonzero(given >= given.max() - _ALIKE))
    if alike == count > 1:
        return f"All {count:,} candidates are about as good: {_meets(row.estimate, epoch)}"
    others = f" (as {alike - 1:,} more {'is' if alike == 2 else 'are'}, nearly)" if alike > 1 else ""
    return f"{row.node} is best{others}: {_meets(row.estimate, epoch)}"


def _meets(one: Estimate, epoch: float) -> str:
    sources = (("there", one.local), ("in its zone", one.zone), ("in its region", one.region))
    parts = [f"{_bytes(size)} {where}" for where, size in (*sources, ("on other nodes", one.elsewhere)) if size]
    if one.origin:
        parts.append(f"{_bytes(one.origin)} at the origin")
    read = f"of what a rank reads, {', '.join(parts)}. " if parts else ""
    length = f" of {_seconds(epoch)}" if epoch else ""
    return (
        f"{read}It waits {_seconds(one.first)} in the first epoch{length}, and {_seconds(one.later)} in each later one."
    )


def _place(row: NodeRow, best: NodeRow) -> str:
    if row.state != "up":
        return f"The job is on {row.node}, of which nothing is expected: it is {row.state}."
    if row.node == best.node or row.score >= best.score - _ALIKE:
        return f"The job is on {row.node}, which is as good as any."
    slower = 100 * (1 / max(row.score, 0.01) - 1)
    return f"The job is on {row.node}, where it takes {slower:.0f} % longer than on {best.node}."


def _silent(row: NodeRow) -> str:
    if row.state == "unknown":
        return f"{row.node} has never been heard: it counts as a node that has nothing."
    if row.state == "away":
        return f"{row.node} is away: what it has does not count."
    counted = f"counts {row.estimate.trust:.0%}" if row.estimate.trust else "does not count any more"
    more = "" if row.age > GRACE else ", and it is heard again"
    return f"{row.node} has been silent for {_seconds(row.age)}: what it said {counted}{more}."


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
