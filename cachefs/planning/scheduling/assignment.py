"""Which nodes the ranks of a job go to: nodes that *together* have its data, and can keep them.

Ranks of a job share what their nodes have, so a node that has what the others lack is worth more than one that has the
same once more. What a choice of nodes saves, in seconds, is

    worth * covered - the mean over ranks of the time that the job would take on the rank's node

with `covered` the part of the snapshot that the nodes have together (each shard at most once), and `worth` how much
longer a rank's part takes from other nodes or the origin than from nodes of the job.
That is a monotone submodular function but for a constant. So to take the best next node, again and again,
saves at least 1 - 1/e = 63 % of what the best choice saves (Nemhauser, Wolsey and Fisher, "An analysis of
approximations for maximizing submodular set functions", Mathematical Programming 14, 1978). Then nodes are exchanged
while that helps, which brings it within a tenth of the best choice in all small cases that tests try.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.scheduling.cluster import Cluster
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import SHARDS, JobAsk
from cachefs.planning.scheduling.scores import cost
from cachefs.planning.scheduling.spread import Numbers

# Candidates that are looked at closely: those that save most alone. With 4,096 ranks it then takes under a second.
_CLOSELY: Final = 512
# Ranks up to which nodes are exchanged, and how often each is looked at.
_EXCHANGED: Final = 64
_ROUNDS: Final = 4
# Ranks up to which those with an order of their own change places.
_MATCHED: Final = 512
# What counts as nothing saved: parts of all that can be saved.
_NOTHING: Final = 1e-9
# Data within the job are worth that much more at least than data beside it, which others may evict or want too.
_OWN: Final = 0.5
# A node that drains or is away: worse than anything that can be saved.
_LAST: Final = 1e3

# Per node and shard: the part that is there, 0 to 1. Shape (nodes, SHARDS), float32.
Held = npt.NDArray[np.float32]


def assign(
    ask: JobAsk,
    candidates: Sequence[str],
    cluster: Cluster,
    *,
    taken: Mapping[int, str] | None = None,
    slots: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """For each rank of the job, its node; "" where none has a slot left.

    taken: by rank, where it runs already, which is not changed, and takes none of the slots. slots: how many more ranks
    each candidate can take, 0 if it is not there; None: each takes as many as are needed for all, alike. 5,000
    candidates take 20 ms for 8 ranks.
    """
    placed = {rank: node for rank, node in (taken or {}).items() if 0 <= rank < ask.ranks}
    names = [name for name in dict.fromkeys(candidates) if slots is None or slots.get(name, 0) > 0]
    open_ranks = [rank for rank in range(ask.ranks) if rank not in placed]
    ranks: dict[int, str] = {}
    if names and open_ranks:
        alike = -(-len(open_ranks) // len(names))
        limits = np.array([alike if slots is None else slots[name] for name in names], np.int64)
        choice = choices(ask, names, limits, cluster, frozenset(placed.values()))
        ranks = _matched(ask, open_ranks, choice.best(len(open_ranks)), cluster)
    return tuple(placed.get(rank, ranks.get(rank, "")) for rank in range(ask.ranks))


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The nodes to choose from, and what each saves. They are numbers here: places in `names`."""

    names: Sequence[str]
    # How many ranks each can take: shape (nodes,).
    limits: npt.NDArray[np.int64]
    # What each has that is not on the job's nodes already, and these: shapes (nodes, SHARDS) and (SHARDS,).
    held: Held
    begun: npt.NDArray[np.float32]
    # Seconds saved by all of the snapshot being among the chosen; and how much of it is read in each shard: (SHARDS,).
    worth: float
    weights: npt.NDArray[np.float32]
    # Seconds saved by a rank on each, whatever the others have: shape (nodes,), at least 0.
    own: Numbers

    def best(self, ranks: int) -> list[str]:
        """A node for each of so many ranks, or of as many as there are slots for."""
        chosen = self._one_by_one(ranks)
        if len(chosen) <= _EXCHANGED:
            chosen = self._exchanged(chosen)
        return [self.names[node] for node in chosen]

    def saved(self, chosen: Sequence[int]) -> float:
        """Seconds saved by ranks on these nodes, each of which may be there several times."""
        together = self._together(chosen)
        return self.worth * float(np.minimum(together, 1) @ self.weights) + float(self.own[list(chosen)].sum())

    def _one_by_one(self, ranks: int) -> list[int]:
        chosen: list[int] = []
        seated: set[int] = set()
        left, together = self.limits.copy(), self.begun
        # What a node saves gets less as others are chosen. So only those are looked at again whose last figure is the
        # best one, and not all of them for each of 16,384 ranks (34 s with 5,000 nodes).
        gains = self._gains(together, chosen)
        heap = [(-float(gains[node]), node) for node in np.flatnonzero(left > 0).tolist()]
        heapq.heapify(heap)
        for _ in range(min(ranks, int(left.sum()))):
            gain, node = self._next(heap, together, seated)
            if gain - self.own[node] <= _NOTHING * self.worth:
                # Together they have all there is: what is left is the best of each alone.
                order = np.argsort(-self.own, kind="stable")
                rest: list[int] = np.repeat(order, left[order])[: ranks - len(chosen)].tolist()
                return chosen + rest
            if node not in seated:
                together = together + self.held[node]
                seated.add(node)
            chosen.append(node)
            left[node] -= 1
            if not left[node]:
                heapq.heappop(heap)
        return chosen

    def _next(
        self, heap: list[tuple[float, int]], together: npt.NDArray[np.float32], seated: Collection[int]
    ) -> tuple[float, int]:
        """What the best node saves now, and which it is: the first one in *heap* from now on."""
        before = float(np.minimum(together, 1) @ self.weights)
        while True:
            _, node = heap[0]
            more = 0.0
            if node not in seated:
                more = self.worth * (float(np.minimum(together + self.held[node], 1) @ self.weights) - before)
            gain = float(self.own[node]) + more
            heapq.heapreplace(heap, (-gain, node))
            if heap[0][1] == node:
                return gain, node

    def _exchanged(self, chosen: list[int]) -> list[int]:
        """*chosen*, with nodes put in the place of others as long as that saves more."""
        for _ in range(_ROUNDS):
            before = list(chosen)
            for place in range(len(chosen)):
                others = chosen[:place] + chosen[place + 1 :]
                gains = self._gains(self._together(others), others)
                gains[np.bincount(others, minlength=len(self.names)) >= self.limits] = -np.inf
                node = int(gains.argmax())
                if gains[node] > gains[chosen[place]] + _NOTHING * self.worth:
                    chosen[place] = node
            if chosen == before:
                break
        return chosen

    def _together(self, chosen: Sequence[int]) -> npt.NDArray[np.float32]:
        total: npt.NDArray[np.float32] = self.begun + self.held[sorted(set(chosen))].sum(axis=0)
        return total

    def _gains(self, together: npt.NDArray[np.float32], chosen: Sequence[int]) -> Numbers:
        """Seconds that one more rank on each node would save, where *chosen* nodes have *together*: shape (nodes,)."""
        before = float(np.minimum(together, 1) @ self.weights)
        more = np.minimum(together + self.held, 1) @ self.weights - before
        more[list(chosen)] = 0.0
        gains: Numbers = self.own + self.worth * more
        return gains


def choices(
    ask: JobAsk, names: Sequence[str], limits: npt.NDArray[np.int64], cluster: Cluster, begun: frozenset[str]
) -> Choices:
    """What there is to choose from: those of *names* that save most alone, with *limits* as many ranks on each, for a
    job that runs on the nodes *begun* already."""
    found = estimates(ask, names, cluster, soon=True)
    rows, spread = cluster.rows(names), cluster.expected(ask.snapshot)
    each = max(1.0, spread.size / ask.ranks)
    inside = float(np.median(each / cluster.rate("peer_rate", rows)))
    outside = max(float(np.median(found.remote)), inside) + _OWN * inside
    part = found.sources[0] / each
    worth = outside - inside
    takes = cost(found, ask.epochs)
    own = -np.where(cluster.up(rows), takes, _LAST * (takes.max() + worth)) / ask.ranks

    order = np.argsort(-(own + worth * part), kind="stable")
    enough = int(np.searchsorted(np.cumsum(limits[order]), ask.ranks)) + 1
    order = order[: max(_CLOSELY, enough)]
    held = spread.matrix_of(rows[order]) * cluster.trust(rows[order]).astype(np.float32)[:, None]
    held[[place for place, node in enumerate(order.tolist()) if names[node] in begun]] = 0.0
    here = spread.matrix_of(cluster.rows(sorted(begun))).sum(axis=0)
    weights = np.full(SHARDS, 1 / SHARDS) if ask.order is None else ask.order.mean(axis=0)
    return Choices(
        [names[node] for node in order.tolist()],
        limits[order],
        held,
        here,
        worth,
        weights.astype(np.float32),
        own[order] - own[order].min(),
    )


def _matched(ask: JobAsk, ranks: Sequence[int], nodes: Sequence[str], cluster: Cluster) -> dict[int, str]:
    """Which of the ranks goes to which of the nodes. Where each reads its own shards, it goes to where they are: two
    ranks change places as long as more is read locally then."""
    ranks = ranks[: len(nodes)]
    places = np.arange(len(ranks))
    if ask.order is not None and len(ranks) <= _MATCHED:
        held = cluster.expected(ask.snapshot).matrix_of(cluster.rows(nodes))
        # Of each rank and each place, the part of the rank's reads that would be local.
        local = ask.order[list(ranks)] @ held.T
        for rank in range(len(ranks)):
            free = places[rank:]
            best = rank + int(local[rank, free].argmax())
            places[[rank, best]] = places[[best, rank]]
        for _ in range(len(ranks)):
            there = local[:, places]
            stay = there.diagonal()
            more = there + there.T - stay[:, None] - stay[None, :]
            one, other = divmod(int(more.argmax()), len(ranks))
            if more[one, other] <= _NOTHING:
                break
            places[[one, other]] = places[[other, one]]
    return {rank: nodes[place] for rank, place in zip(ranks, places.tolist(), strict=True)}
