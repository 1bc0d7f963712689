"""Homes of all blocks of a snapshot, and of their second copies, updated as members come and go.

`BlockHomes` keeps the best score of each block. A new member is therefore compared with that score alone, and only the
blocks of a member that left are compared again with all members.

`blocks_at_home` and `candidate_nodes` find the blocks that have their home on a node, and the other nodes that may have
blocks this node lacks. They work in parts of a million blocks, so that intermediate results take some 40 MB however
many blocks there are. `member_shares` and `ring_diff` measure each member's share of all blocks, and the blocks that
move when the members change, on a sample of as many blocks as a medium-sized dataset has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.rendezvous import Hashes, RingMember, Scores, draws, mix_bits, score_of, scores

# Per block: a member, as its index in the list of members, or NO_NODE. Shape (blocks,), uint16.
NodeNumbers = npt.NDArray[np.uint16]
NO_NODE: Final = 0xFFFF
# Most members: each has a number below NO_NODE.
MAX_MEMBERS: Final = NO_NODE

# Blocks per part, so that intermediate results stay in a processor's cache: twice as fast as a million at once.
_BLOCKS_PER_PART: Final = 1 << 14
# Blocks of the sample: with 8 members the shares are exact to 0.7 %, with 1,000 to 9 %, as for a real dataset of that
# size.
SAMPLED_BLOCKS: Final = 1 << 17
_BLOCKS_PER_PASS: Final = 1 << 20


class BlockHomes:
    """Assigns each block a member as its home. One thread at a time may change the members; the arrays `first` and
    `second` are replaced and never changed, so that any thread may read them."""

    def __init__(self, hashes: Hashes, replicas: int = 1) -> None:
        """hashes: of all blocks (see cachefs.planning.cluster.rendezvous.key_hashes). replicas: copies of each block in
        the cluster, 1 or 2."""
        self.members: tuple[RingMember, ...] = ()  # in ascending order of their ids
        # Home of each block, NO_NODE where there is no member.
        self.first: NodeNumbers = np.full(len(hashes), NO_NODE, np.uint16)
        # Home of each second copy: in another zone if there is one. NO_NODE with one replica, or a single member.
        self.second: NodeNumbers = self.first
        # Zone number of each member, and -1 for NO_NODE at the end: shape (members + 1,), int32. If there is only one
        # zone, each member counts as a zone of its own.
        self.zones: npt.NDArray[np.int32] = np.array([-1], np.int32)
        self._hashes = hashes
        self._replicas = replicas
        self._first_scores: Scores = np.full(len(hashes), -np.inf)
        self._second_scores: Scores = self._first_scores

    def set_members(self, members: Sequence[RingMember]) -> Ids:
        """Replace the members. Returns the numbers of the blocks whose home has changed, in ascending order: shape
        (n,), int32. Raises ValueError for two members with one id, or too many."""
        members = tuple(sorted(members, key=lambda one: one.id))
        if len({member.id for member in members}) < len(members) or len(members) > MAX_MEMBERS:
            raise ValueError(f"{len(members):,} members; at most {MAX_MEMBERS:,}, and each with an id of its own")
        known = {(one.id, one.seed, one.weight): number for number, one in enumerate(self.members)}
        numbers = [known.get((member.id, member.seed, member.weight)) for member in members]
        renumbered = np.full(NO_NODE + 1, NO_NODE, np.uint16)  # index in the old list -> index in the new one
        for number, old in enumerate(numbers):
            if old is not None:
                renumbered[old] = number
        came = [number for number, old in enumerate(numbers) if old is None]
        ring = _Ring(self._hashes, members)

        stayed = renumbered[self.first]
        first, best = stayed.copy(), self._first_scores.copy()
        ring.choose(first, best, np.flatnonzero(first == NO_NODE), came)
        if self._replicas > 1:
            second, best_second = renumbered[self.second], self._second_scores.copy()
            again = (
                (first != stayed)
                | (second == NO_NODE)
                | (_zones(self.members, members) != _zones(members, self.members))
            )
            ring.choose(second, best_second, np.flatnonzero(again), came, first)
            self.second, self._second_scores = second, best_second
        else:
            self.second = np.full(len(first), NO_NODE, np.uint16)
        moved = first != reindex_nodes(self.first, [member.id for member in self.members], [one.id for one in members])
        moved |= (first == NO_NODE) & (self.first != NO_NODE)
        self.members, self.first, self._first_scores, self.zones = members, first, best, ring.zones
        return np.flatnonzero(moved).astype(np.int32)


class _Ring:
    """Chooses the member with the highest score for blocks."""

    def __init__(self, hashes: Hashes, members: Sequence[RingMember]) -> None:
        """hashes: of all blocks."""
        self._hashes = hashes
        self._members = members
        by_weight = sorted(range(len(members)), key=lambda number: (members[number].weight, number))
        self._by_weight = [list(group) for _, group in groupby(by_weight, key=lambda number: members[number].weight)]
        zones = list(_zones(members, members).values())
        names = {zone: number for number, zone in enumerate(dict.fromkeys(zones))}
        # Zone of each member, and of NO_NODE at the end.
        self.zones = np.array([*(names[zone] for zone in zones), -1], np.int32)

    def choose(
        self,
        chosen: NodeNumbers,
        best: Scores,
        unassigned: npt.NDArray[np.intp],
        added: Sequence[int],
        excluded: NodeNumbers | None = None,
    ) -> None:
        """Update *chosen*, and the scores *best* of the chosen members: both of shape (blocks,).

        unassigned: the blocks without a chosen member among the old members: shape (n,), intp; added: the new members;
        excluded: per block a member whose zone is excluded.
        """
        for start in range(0, len(unassigned), _BLOCKS_PER_PART):
            ids = unassigned[start : start + _BLOCKS_PER_PART]
            chosen[ids], best[ids] = self._best(self._hashes[ids], None if excluded is None else excluded[ids])
        if len(unassigned) == len(chosen):
            return
        for start in range(0, len(chosen), _BLOCKS_PER_PART):
            part = slice(start, start + _BLOCKS_PER_PART)
            for number in added:
                score = scores(self._hashes[part], self._members[number])
                wins = (score > best[part]) | ((score == best[part]) & (number < chosen[part]))
                if excluded is not None:
                    wins &= self._is_in_other_zone(number, excluded[part])
                best[part][wins] = score[wins]
                chosen[part][wins] = number

    def _best(self, hashes: Hashes, excluded: NodeNumbers | None) -> tuple[NodeNumbers, Scores]:
        """Return the members with the highest scores, and the scores. Among members of equal weight the highest draw
        wins, so that one logarithm per block suffices for all of them."""
        chosen = np.full(len(hashes), NO_NODE, np.uint16)
        best = np.full(len(hashes), -np.inf)
        for group in self._by_weight:
            who = np.full(len(hashes), NO_NODE, np.uint16)
            highest = np.zeros(len(hashes), np.uint64)
            for number in group:
                drawn = draws(hashes, self._members[number].seed)
                wins = drawn > highest
                if excluded is not None:
                    wins &= self._is_in_other_zone(number, excluded)
                np.copyto(highest, drawn, where=wins)
                np.copyto(who, number, where=wins)
            score = score_of(highest, self._members[group[0]].weight)
            wins = (who != NO_NODE) & ((score > best) | ((score == best) & (who < chosen)))
            np.copyto(best, score, where=wins)
            np.copyto(chosen, who, where=wins)
        return chosen, best

    def _is_in_other_zone(self, number: int, others: NodeNumbers) -> npt.NDArray[np.bool_]:
        """Return whether member *number* is in another zone than each of *others*."""
        apart: npt.NDArray[np.bool_] = self.zones.take(others, mode="clip") != self.zones[number]
        return apart


def _zones(members: Sequence[RingMember], common: Sequence[RingMember]) -> Mapping[str, str]:
    """Return the zone of each of the *members* that are in *common* too, by id. A member without a zone is a zone of
    its own, and so is each member where there is only one zone."""
    alone = len({member.zone for member in members}) < 2
    ids = {one.id for one in common}
    return {one.id: one.zone if one.zone and not alone else f"\0{one.id}" for one in members if one.id in ids}


def reindex_nodes(nodes: NodeNumbers, before: Sequence[str], after: Sequence[str]) -> NodeNumbers:
    """Translate indices in the list of ids *before* to indices in the list *after*: NO_NODE for ids that are gone.

    Shape (n,), uint16.
    """
    indices = {name: number for number, name in enumerate(after)}
    renumbered = np.full(len(before) + 1, NO_NODE, np.uint16)
    for number, name in enumerate(before):
        renumbered[number] = indices.get(name, NO_NODE)
    moved: NodeNumbers = renumbered.take(nodes, mode="clip")
    return moved


@dataclass(frozen=True, slots=True)
class MemberShare:
    """One member's share. Parts of all blocks, 0 to 1."""

    member: RingMember
    # Part expected from its weight.
    ideal: float
    # Part whose home it is.
    homes: float
    # Part whose second copy it has.
    seconds: float


@dataclass(frozen=True, slots=True)
class MemberChange:
    """The change for one member. Parts of all blocks, 0 to 1, each block counted once."""

    member: RingMember
    # Part whose home it is: before and after.
    before: float
    after: float
    # Part whose home it becomes, and ceases to be.
    gets: float
    gives: float


@dataclass(frozen=True, slots=True)
class RingDiff:
    """The blocks that a change of members would move."""

    # By id, of the members before and after.
    changes: Sequence[MemberChange]
    # Part of all blocks whose home changes.
    moved: float
    # Least part that must move: the sum of the members' deficits to their ideal shares.
    least: float


def member_shares(members: Sequence[RingMember], replicas: int = 1) -> list[MemberShare]:
    """Return the share of each member, by id. Raises ValueError for two with one id."""
    homes = BlockHomes(_sample_hashes(), replicas)
    homes.set_members(members)
    total = sum(member.weight for member in members)
    first, second = _parts(homes.first, len(members)), _parts(homes.second, len(members))
    return [
        MemberShare(one, one.weight / total, first[number], second[number]) for number, one in enumerate(homes.members)
    ]


def ring_diff(before: Sequence[RingMember], after: Sequence[RingMember]) -> RingDiff:
    """Return what moves when the members *before* become the members *after*. Raises ValueError for two with one id."""
    homes = BlockHomes(_sample_hashes())
    homes.set_members(before)
    everyone = {one.id: one for one in (*before, *after)}
    ids = sorted(everyone)
    old = reindex_nodes(homes.first, [member.id for member in homes.members], ids)
    homes.set_members(after)
    new = reindex_nodes(homes.first, [member.id for member in homes.members], ids)
    moved = old != new
    had, has = _parts(old, len(ids)), _parts(new, len(ids))
    gets, gives = _parts(new[moved], len(ids), len(old)), _parts(old[moved], len(ids), len(old))
    changes = [
        MemberChange(everyone[name], had[number], has[number], gets[number], gives[number])
        for number, name in enumerate(ids)
    ]
    total = sum(one.weight for one in after)
    ideal = {one.id: one.weight / total for one in after}
    least = sum(max(0.0, ideal.get(name, 0.0) - had[number]) for number, name in enumerate(ids))
    return RingDiff(changes, float(moved.mean()), least)


def _sample_hashes() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return hashes like those of blocks: shape (SAMPLED_BLOCKS,), uint64."""
    return mix_bits(np.arange(1, SAMPLED_BLOCKS + 1, dtype=np.uint64))


def _parts(nodes: np.ndarray[tuple[int], np.dtype[np.uint16]], members: int, of: int | None = None) -> list[float]:
    """Return for each member its part of *nodes*, relative to their number or to *of*."""
    counts = np.bincount(nodes[nodes != NO_NODE], minlength=members)
    return [count / (of or max(1, len(nodes))) for count in counts.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class NodeCandidates:
    """One candidate node for each of some blocks."""

    # Ids of the nodes that the numbers stand for.
    ids: tuple[str, ...]
    # Indices in *ids*, NO_NODE where there is none: shape (n,), uint16.
    nodes: NodeNumbers

    def select(self, indices: npt.NDArray[np.integer]) -> "NodeCandidates":
        """Return the candidates of some of the blocks. indices: shape (m,)."""
        return NodeCandidates(self.ids, self.nodes[indices])

    def are_among(self, ids: "set[str] | frozenset[str]") -> npt.NDArray[np.bool_]:
        """Return for each block whether its candidate is one of these nodes: shape (n,), bool."""
        marks = np.array([one in ids for one in self.ids] + [False])
        found: npt.NDArray[np.bool_] = marks.take(self.nodes, mode="clip")
        return found


def blocks_at_home(hashes: Hashes, members: Sequence[RingMember], me: str) -> npt.NDArray[np.bool_]:
    """Return which blocks have their home on member *me*: shape (blocks,), bool.

    hashes: of all blocks, see cachefs.planning.cluster.rendezvous. All False where *me* is no member.
    """
    found = np.zeros(len(hashes), np.bool_)
    for start in range(0, len(hashes) if any(member.id == me for member in members) else 0, _BLOCKS_PER_PASS):
        homes = BlockHomes(hashes[start : start + _BLOCKS_PER_PASS])
        homes.set_members(members)
        number = [member.id for member in homes.members].index(me)
        found[start : start + _BLOCKS_PER_PASS] = homes.first == number
    return found


def candidate_nodes(hashes: Hashes, rings: Sequence[Sequence[RingMember]], replicas: int) -> list[NodeCandidates]:
    """Return for each ring the home of each block, and with two *replicas* also that of its second copy, in the order
    of the rings. Rings without members are left out. hashes: shape (blocks,), uint64."""
    rings = [sorted(ring, key=lambda one: one.id) for ring in rings if ring]
    copies = min(replicas, 2)
    found = [np.full((copies, len(hashes)), NO_NODE, np.uint16) for _ in rings]
    for start in range(0, len(hashes), _BLOCKS_PER_PASS):
        homes = BlockHomes(hashes[start : start + _BLOCKS_PER_PASS], replicas)
        for ring, nodes in zip(rings, found, strict=True):
            homes.set_members(ring)
            for row, chosen in zip(nodes, (homes.first, homes.second), strict=False):
                row[start : start + _BLOCKS_PER_PASS] = chosen
    return [
        NodeCandidates(tuple(one.id for one in ring), row)
        for ring, nodes in zip(rings, found, strict=True)
        for row in nodes
    ]
