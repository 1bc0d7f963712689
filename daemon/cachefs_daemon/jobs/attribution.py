"""Whose the reads and the stalls are that a mount reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.job_messages import StallRow
from cachefs.messages import Stall
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.states import NOTHING, WANTED, PageStates
from cachefs.planning.sequences.follower import Follower, FollowerFailed, Passed, observe
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position import Position
from cachefs_daemon.fetch.waiting_reads import Reader
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.stalls import merged

# Reads ahead of a consumer by which it is judged how many of them will show, and by how much at most.
VISIBLE: Final = 4096
MOST_HIDDEN: Final = 64


@dataclass(frozen=True, slots=True)
class Observed:
    """What a mount's reads say of the jobs."""

    # By snapshot: numbers of the blocks that were left out of the mount's page cache to see them read, and were read.
    # One dimension, int32.
    tripped: Mapping[str, Ids]
    # By key of a consumer: how many of the reads were its own.
    own_reads: Mapping[str, int]
    # Seconds that each read of a planned block has waited for an origin, or for another node.
    late: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Followed:
    """A consumer whose place is known."""

    consumer: Consumer
    position: Position

    @property
    def follower(self) -> Follower:
        return self.position.follower


@dataclass(frozen=True, slots=True)
class _Owner:
    """For whom a block was fetched, and the block: its number in its space, and bytes."""

    consumer: Consumer
    block: int
    size: int


class Attribution:
    """Moves the consumers of running jobs on with what mounts report. Used from the event loop only."""

    def __init__(self, plan: Plan, jobs: JobRegistry) -> None:
        self._plan = plan
        self._jobs = jobs

    def on_reads(
        self, accessed: Sequence[bytes], stalls: Sequence[Stall], now: float, pages: PageStates = NOTHING
    ) -> Observed:
        """A mount reports keys of blocks that were read, in order, and reads that waited. now: seconds of a monotonic
        clock; pages: what is in the mount's page cache."""
        waited, late = self._attribute(stalls)
        tripped: dict[str, Ids] = {}
        own_reads: dict[str, int] = {}
        for snapshot, followed in self._by_snapshot().items():
            ids = self._plan.spaces[snapshot].ids(accessed)
            ids = ids[ids >= 0]
            before = [one.follower.evidence.matched for one in followed]
            if snapshot in pages:
                passed = self._trip(followed, ids, pages[snapshot], now)
                tripped[snapshot] = passed.wires
                if len(passed.reads):
                    ids = ids[~np.isin(ids, passed.reads)]
            _observe(followed, ids)
            for one, matched in zip(followed, before, strict=True):
                consumer, follower = one.consumer, one.follower
                if consumer.position is None:
                    continue
                if follower.evidence.matched > matched:
                    if not consumer.request.heartbeats:
                        consumer.liveness.renew(now)
                    own_reads[consumer.key] = follower.evidence.matched - matched
                follower.measure_rate(now, waited.get(consumer.key, 0.0), consumer.request.workers)
                consumer.moved()
        return Observed(tripped, own_reads, late)

    def _trip(self, followed: Sequence[_Followed], ids: Ids, states: npt.NDArray[np.uint8], now: float) -> Passed:
        """Move those consumers on whose tripwires are among the blocks *ids*: shape (n,), int32. states: the PageState
        of each block of the space, shape (blocks of the space,), uint8."""
        found = [Passed(ids[:0], ids[:0])]
        ahead = [one.follower.ahead(ids) for one in followed] if len(followed) > 1 else [np.zeros(len(ids))]
        nearest = np.min(ahead, axis=0)
        for place, one in enumerate(followed):
            window = self._plan.window(one.consumer.key, 0, VISIBLE)
            if window is not None:
                shown = float(np.mean(WANTED[states[window.blocks]]))
                one.follower.visibility.hidden = 1 / max(shown, 1 / MOST_HIDDEN)
                # Where several consumers read, the tripwires of one are read by the others too: far ahead they prove
                # nothing.
                unseen = one.position.unseen(now) if len(followed) == 1 else 0
                # A block that another consumer comes to sooner was read by that one. Compared with what is nearest to
                # any of them, itself included: with each of the others in turn, 1,024 consumers took 0.3 s.
                ours = ids[ahead[place] <= nearest]
                found.append(one.follower.tripped(ours, one.position.left_out(now), unseen))
        return Passed(np.concatenate([one.wires for one in found]), np.concatenate([one.reads for one in found]))

    def _attribute(self, stalls: Sequence[Stall]) -> tuple[dict[str, float], list[float]]:
        """Count the stalls, each for whom it was. Seconds that each consumer has waited, by its key; and seconds of
        each stall of a consumer for an origin or another node."""
        waited: dict[str, float] = {}
        late: list[float] = []
        for stall, found in zip(stalls, self._owners([stall.key for stall in stalls]), strict=True):
            if found is None:
                self._jobs.stalls.add("", "", 0, stall.source, stall.seconds)
            else:
                owner = found.consumer
                self._jobs.stalls.add(owner.request.job, owner.name, owner.shown_epoch, stall.source, stall.seconds)
                waited[owner.key] = waited.get(owner.key, 0.0) + stall.seconds
                if _is_fetch(stall.source):
                    late.append(stall.seconds)
                    via = "" if stall.source == "origin" else stall.source
                    self._jobs.fetched(owner.key, found.block, found.size, via)
        return waited, late

    def waiting(self, reads: Sequence[Stall]) -> list[StallRow]:
        """Reads that wait now, by whose they are, as far as that is known."""
        rows: list[StallRow] = []
        for read, found in zip(reads, self._owners([read.key for read in reads]), strict=True):
            one = found.consumer if found is not None else None
            owner = (one.request.job, one.name, one.shown_epoch) if one else ("", "", 0)
            rows.append(StallRow(*owner, read.source, 1, read.seconds, read.seconds, waiting=1))
        return merged(rows)

    def jobs_of(self, snapshot: str, keys: Sequence[bytes]) -> list[Reader]:
        """The jobs whose reads of the blocks with these keys have failed just now."""
        ids = self._plan.spaces[snapshot].ids(keys) if snapshot in self._plan.spaces else np.full(len(keys), -1)
        here = np.flatnonzero(ids >= 0)
        candidates: list[set[str]] = [set() for _ in keys]
        claiming: list[set[str]] = [set() for _ in keys]
        for consumer in self._jobs.consumers:
            if consumer.snapshot.id != snapshot:
                continue
            name, places = consumer.request.job, here
            if consumer.position is None or not self._plan.knows(consumer.key):
                places = np.arange(len(keys))
            else:
                follower = consumer.position.follower
                places = here[follower.may_read(ids[here])]
                for place in here[_claims(follower, ids[here])].tolist():
                    claiming[place].add(name)
            for place in places.tolist():
                candidates[place].add(name)
        return [_reader(*both) for both in zip(candidates, claiming, strict=True)]

    def _owners(self, keys: Sequence[bytes]) -> list[_Owner | None]:
        """For whom each of the blocks is that were waited for: the first consumer that it may be for."""
        owners: list[_Owner | None] = [None] * len(keys)
        for snapshot, followed in self._by_snapshot().items() if keys else ():
            space = self._plan.spaces[snapshot]
            ids = space.ids(keys)
            here = np.flatnonzero(ids >= 0)
            for one in followed:
                # A sequence that is wrong claims nothing; if there is only one, it is still its job that waits.
                blocks = ids[here]
                theirs = one.follower.may_read(blocks) if len(followed) == 1 else _claims(one.follower, blocks)
                for place in here[theirs].tolist():
                    if owners[place] is None:
                        owners[place] = _Owner(one.consumer, int(ids[place]), int(space.sizes[ids[place]]))
        return owners

    def _by_snapshot(self) -> dict[str, list[_Followed]]:
        found: dict[str, list[_Followed]] = {}
        for consumer in self._jobs.consumers:
            # When the daemon ends, plans end before mounts do.
            if consumer.position is not None and self._plan.knows(consumer.key):
                found.setdefault(consumer.snapshot.id, []).append(_Followed(consumer, consumer.position))
        return found


def _observe(followed: Sequence[_Followed], ids: Ids) -> None:
    """Have the consumers look at the reads of the blocks *ids*: shape (n,), int32. One that cannot is given up, and the
    others go on with the next report."""
    try:
        observe([one.follower for one in followed], ids)
    except FollowerFailed as failure:
        cause = failure.__cause__ or failure
        for one in followed:
            if one.follower is failure.follower:
                one.consumer.fail(cause)


def _is_fetch(source: str) -> bool:
    """Was the block on no tier of this node? source: of a stall (see cachefs.messages.Stall)."""
    return source == "origin" or source.startswith("peer ")


def _reader(candidates: set[str], claiming: set[str]) -> Reader:
    """Whose a failed read is that these jobs may have done, and of which *claiming* would read just that now."""
    if len(claiming) == 1:
        return Reader(next(iter(claiming)), is_sure=True)
    return Reader("" if len(candidates) > 1 else next(iter(candidates), None), is_sure=False)


def _claims(follower: Follower, ids: Ids) -> npt.NDArray[np.bool_]:
    """Which of the blocks *ids* (shape (n,), int32) the consumer may have read just now: shape (n,), bool."""
    return follower.claim(ids).mine | follower.evidence.knows(ids)
