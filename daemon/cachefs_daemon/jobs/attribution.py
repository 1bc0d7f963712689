"""Attributes the reads and stalls that a mount reports to consumers."""

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

# Reads ahead of a consumer from which its observed share of reads is estimated: 1 / MOST_HIDDEN at least.
VISIBLE: Final = 4096
MOST_HIDDEN: Final = 64


@dataclass(frozen=True, slots=True)
class Observed:
    """The effect of a mount's reads on the jobs."""

    # By snapshot: tripwires that were read, which are blocks left out of the mount's page cache so that their reads are
    # seen. Numbers, shape (n,), int32.
    tripped: Mapping[str, Ids]
    # By key of a consumer: how many of the reads were its own.
    own_reads: Mapping[str, int]
    # Seconds that each read of a planned block has waited for an origin, or for another node.
    late: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Followed:
    consumer: Consumer
    position: Position

    @property
    def follower(self) -> Follower:
        return self.position.follower


@dataclass(frozen=True, slots=True)
class _Owner:
    """The consumer for which a block was fetched; the block's number in its space, and its bytes."""

    consumer: Consumer
    block: int
    size: int


class Attribution:
    """Advances the consumers of running jobs by the reads that mounts report. Used from the event loop only."""

    def __init__(self, plan: Plan, jobs: JobRegistry) -> None:
        self._plan = plan
        self._jobs = jobs

    def on_reads(
        self, accessed: Sequence[bytes], stalls: Sequence[Stall], now: float, pages: PageStates = NOTHING
    ) -> Observed:
        """Process keys of blocks that a mount has read, in order, and its stalls. now: seconds of a monotonic clock;
        pages: the contents of the mount's page cache."""
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
        """Advance the consumers whose tripwires are among the blocks *ids*: shape (n,), int32. states: the PageState of
        each block of the space, shape (blocks of the space,), uint8."""
        found = [Passed(ids[:0], ids[:0])]
        ahead = [one.follower.ahead(ids) for one in followed] if len(followed) > 1 else [np.zeros(len(ids))]
        nearest = np.min(ahead, axis=0)
        for place, one in enumerate(followed):
            window = self._plan.window(one.consumer.key, 0, VISIBLE)
            if window is not None:
                shown = float(np.mean(WANTED[states[window.blocks]]))
                one.follower.visibility.hidden = 1 / max(shown, 1 / MOST_HIDDEN)
                # Where several consumers read, each also reads the tripwires of the others, so tripwires far ahead
                # prove nothing.
                unseen = one.position.unseen(now) if len(followed) == 1 else 0
                # A block that another consumer reaches sooner was read by that consumer. The comparison is with the
                # nearest position of any consumer, this one included: comparing with each of the others in turn took
                # 0.3 s for 1,024 consumers.
                ours = ids[ahead[place] <= nearest]
                found.append(one.follower.tripped(ours, one.position.left_out(now), unseen))
        return Passed(np.concatenate([one.wires for one in found]), np.concatenate([one.reads for one in found]))

    def _attribute(self, stalls: Sequence[Stall]) -> tuple[dict[str, float], list[float]]:
        """Count each stall for its consumer. Return the seconds that each consumer has waited, by key, and the seconds
        of each stall of a consumer for an origin or another node."""
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
        """Return the reads that wait now, attributed to consumers as far as these are known."""
        rows: list[StallRow] = []
        for read, found in zip(reads, self._owners([read.key for read in reads]), strict=True):
            one = found.consumer if found is not None else None
            owner = (one.request.job, one.name, one.shown_epoch) if one else ("", "", 0)
            rows.append(StallRow(*owner, read.source, 1, read.seconds, read.seconds, waiting=1))
        return merged(rows)

    def jobs_of(self, snapshot: str, keys: Sequence[bytes]) -> list[Reader]:
        """Return, for each of the blocks *keys*, the job whose read of it has just failed, as far as that is known."""
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
        """Return, for each block, the first consumer that may have waited for it."""
        owners: list[_Owner | None] = [None] * len(keys)
        for snapshot, followed in self._by_snapshot().items() if keys else ():
            space = self._plan.spaces[snapshot]
            ids = space.ids(keys)
            here = np.flatnonzero(ids >= 0)
            for one in followed:
                # A wrong sequence claims no blocks; where there is only one consumer, its job still is the one that
                # waits.
                blocks = ids[here]
                theirs = one.follower.may_read(blocks) if len(followed) == 1 else _claims(one.follower, blocks)
                for place in here[theirs].tolist():
                    if owners[place] is None:
                        owners[place] = _Owner(one.consumer, int(ids[place]), int(space.sizes[ids[place]]))
        return owners

    def _by_snapshot(self) -> dict[str, list[_Followed]]:
        found: dict[str, list[_Followed]] = {}
        for consumer in self._jobs.consumers:
            # When the daemon stops, plans end before mounts do.
            if consumer.position is not None and self._plan.knows(consumer.key):
                found.setdefault(consumer.snapshot.id, []).append(_Followed(consumer, consumer.position))
        return found


def _observe(followed: Sequence[_Followed], ids: Ids) -> None:
    """Let the consumers observe the reads of the blocks *ids*: shape (n,), int32. A consumer that fails is given up,
    and the others continue with the next report."""
    try:
        observe([one.follower for one in followed], ids)
    except FollowerFailed as failure:
        cause = failure.__cause__ or failure
        for one in followed:
            if one.follower is failure.follower:
                one.consumer.fail(cause)


def _is_fetch(source: str) -> bool:
    """Return whether the block was on no tier of this node. source: of a stall (see cachefs.messages.Stall)."""
    return source == "origin" or source.startswith("peer ")


def _reader(candidates: set[str], claiming: set[str]) -> Reader:
    """Return the job of a read that *candidates* may have done and *claiming* would do just now."""
    if len(claiming) == 1:
        return Reader(next(iter(claiming)), is_sure=True)
    return Reader("" if len(candidates) > 1 else next(iter(candidates), None), is_sure=False)


def _claims(follower: Follower, ids: Ids) -> npt.NDArray[np.bool_]:
    """Return which of the blocks *ids* (shape (n,), int32) the consumer may have read just now: shape (n,), bool."""
    return follower.claim(ids).mine | follower.evidence.knows(ids)
