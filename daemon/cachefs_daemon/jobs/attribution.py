"""Attributes the reads and stalls that a mount reports to consumers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.job_messages import StallRow
from cachefs.messages import Stall
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.states import NO_PAGES, WANTED, PageStates
from cachefs.planning.sequences.follower import FollowerFailed, PassedTripwires, SequenceFollower, observe_reads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position_estimate import PositionEstimate
from cachefs_daemon.fetch.waiting_reads import ReadAttribution
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.stalls import merge_rows

# Reads ahead of a consumer from which its observed share of reads is estimated: 1 / MAX_HIDDEN_RATIO at least.
WINDOW_READS: Final = 4096
MAX_HIDDEN_RATIO: Final = 64


@dataclass(frozen=True, slots=True)
class ReadEffects:
    """The effect of a mount's reads on the jobs."""

    # By snapshot: tripwires that were read, which are blocks left out of the mount's page cache so that their reads are
    # seen. Numbers, shape (n,), int32.
    tripwires_read: Mapping[str, Ids]
    # By key of a consumer: how many of the reads were its own.
    own_reads: Mapping[str, int]
    # Seconds that each read of a planned block has waited for an origin, or for another node.
    late_seconds: Sequence[float]


@dataclass(frozen=True, slots=True)
class _FollowedConsumer:
    consumer: Consumer
    position: PositionEstimate

    @property
    def follower(self) -> SequenceFollower:
        return self.position.follower


@dataclass(frozen=True, slots=True)
class _BlockOwner:
    """The consumer for which a block was fetched; the block's number in its space, and its bytes."""

    consumer: Consumer
    block: int
    size: int


class Attribution:
    """Advances the consumers of running jobs by the reads that mounts report. Used from the event loop only."""

    def __init__(self, plan: Plan, jobs: JobRegistry) -> None:
        self._plan = plan
        self._jobs = jobs

    def note_reads(
        self, accessed: Sequence[bytes], stalls: Sequence[Stall], now: float, pages: PageStates = NO_PAGES
    ) -> ReadEffects:
        """Process keys of blocks that a mount has read, in order, and its stalls. now: seconds of a monotonic clock;
        pages: the contents of the mount's page cache."""
        waited, late = self._count_stalls(stalls)
        tripped: dict[str, Ids] = {}
        own_reads: dict[str, int] = {}
        for snapshot, followed in self._followed_by_snapshot().items():
            ids = self._plan.spaces[snapshot].ids(accessed)
            ids = ids[ids >= 0]
            before = [one.follower.evidence.matched for one in followed]
            if snapshot in pages:
                passed = self._advance_by_tripwires(followed, ids, pages[snapshot], now)
                tripped[snapshot] = passed.wires
                if len(passed.reads):
                    ids = ids[~np.isin(ids, passed.reads)]
            _observe_reads(followed, ids)
            for one, matched in zip(followed, before, strict=True):
                consumer, follower = one.consumer, one.follower
                if consumer.position is None:
                    continue
                if follower.evidence.matched > matched:
                    if not consumer.request.heartbeats:
                        consumer.liveness.renew(now)
                    own_reads[consumer.key] = follower.evidence.matched - matched
                follower.measure_rate(now, waited.get(consumer.key, 0.0), consumer.request.workers)
                consumer.update_position()
        return ReadEffects(tripped, own_reads, late)

    def _advance_by_tripwires(
        self, followed: Sequence[_FollowedConsumer], ids: Ids, states: npt.NDArray[np.uint8], now: float
    ) -> PassedTripwires:
        """Advance the consumers whose tripwires are among the blocks *ids*: shape (n,), int32. states: the PageState of
        each block of the space, shape (blocks of the space,), uint8."""
        found = [PassedTripwires(ids[:0], ids[:0])]
        ahead = [one.follower.reads_ahead(ids) for one in followed] if len(followed) > 1 else [np.zeros(len(ids))]
        nearest = np.min(ahead, axis=0)
        for index, one in enumerate(followed):
            window = self._plan.window(one.consumer.key, 0, WINDOW_READS)
            if window is not None:
                shown = float(np.mean(WANTED[states[window.blocks]]))
                one.follower.observed_share.hidden_ratio = 1 / max(shown, 1 / MAX_HIDDEN_RATIO)
                # Where several consumers read, each also reads the tripwires of the others, so tripwires far ahead
                # prove nothing.
                unseen = one.position.unseen_reads(now) if len(followed) == 1 else 0
                # A block that another consumer reaches sooner was read by that consumer. The comparison is with the
                # nearest position of any consumer, this one included: comparing with each of the others in turn took
                # 0.3 s for 1,024 consumers.
                ours = ids[ahead[index] <= nearest]
                found.append(one.follower.on_tripwires(ours, one.position.left_out_interval(now), unseen))
        return PassedTripwires(
            np.concatenate([one.wires for one in found]), np.concatenate([one.reads for one in found])
        )

    def _count_stalls(self, stalls: Sequence[Stall]) -> tuple[dict[str, float], list[float]]:
        """Count each stall for its consumer. Return the seconds that each consumer has waited, by key, and the seconds
        of each stall of a consumer for an origin or another node."""
        waited: dict[str, float] = {}
        late: list[float] = []
        for stall, found in zip(stalls, self._owners_of_blocks([stall.key for stall in stalls]), strict=True):
            if found is None:
                self._jobs.stalls.count_stall("", "", 0, stall.source, stall.seconds)
            else:
                owner = found.consumer
                self._jobs.stalls.count_stall(
                    owner.request.job, owner.name, owner.shown_epoch, stall.source, stall.seconds
                )
                waited[owner.key] = waited.get(owner.key, 0.0) + stall.seconds
                if _is_fetch_source(stall.source):
                    late.append(stall.seconds)
                    via = "" if stall.source == "origin" else stall.source
                    self._jobs.note_fetched_block(owner.key, found.block, found.size, via)
        return waited, late

    def waiting_rows(self, reads: Sequence[Stall]) -> list[StallRow]:
        """Return the reads that wait now, attributed to consumers as far as these are known."""
        rows: list[StallRow] = []
        for read, found in zip(reads, self._owners_of_blocks([read.key for read in reads]), strict=True):
            one = found.consumer if found is not None else None
            owner = (one.request.job, one.name, one.shown_epoch) if one else ("", "", 0)
            rows.append(StallRow(*owner, read.source, 1, read.seconds, read.seconds, waiting=1))
        return merge_rows(rows)

    def attribute_failed_reads(self, snapshot: str, keys: Sequence[bytes]) -> list[ReadAttribution]:
        """Return, for each of the blocks *keys*, the job whose read of it has just failed, as far as that is known."""
        ids = self._plan.spaces[snapshot].ids(keys) if snapshot in self._plan.spaces else np.full(len(keys), -1)
        here = np.flatnonzero(ids >= 0)
        candidates: list[set[str]] = [set() for _ in keys]
        claiming: list[set[str]] = [set() for _ in keys]
        for consumer in self._jobs.consumers:
            if consumer.snapshot.id != snapshot:
                continue
            name, indices = consumer.request.job, here
            if consumer.position is None or not self._plan.has_consumer(consumer.key):
                indices = np.arange(len(keys))
            else:
                follower = consumer.position.follower
                indices = here[follower.are_own(ids[here])]
                for index in here[_may_have_read(follower, ids[here])].tolist():
                    claiming[index].add(name)
            for index in indices.tolist():
                candidates[index].add(name)
        return [_attribute_read(*both) for both in zip(candidates, claiming, strict=True)]

    def _owners_of_blocks(self, keys: Sequence[bytes]) -> list[_BlockOwner | None]:
        """Return, for each block, the first consumer that may have waited for it."""
        owners: list[_BlockOwner | None] = [None] * len(keys)
        for snapshot, followed in self._followed_by_snapshot().items() if keys else ():
            space = self._plan.spaces[snapshot]
            ids = space.ids(keys)
            here = np.flatnonzero(ids >= 0)
            for one in followed:
                # A wrong sequence claims no blocks; where there is only one consumer, its job still is the one that
                # waits.
                blocks = ids[here]
                theirs = one.follower.are_own(blocks) if len(followed) == 1 else _may_have_read(one.follower, blocks)
                for index in here[theirs].tolist():
                    if owners[index] is None:
                        owners[index] = _BlockOwner(one.consumer, int(ids[index]), int(space.sizes[ids[index]]))
        return owners

    def _followed_by_snapshot(self) -> dict[str, list[_FollowedConsumer]]:
        found: dict[str, list[_FollowedConsumer]] = {}
        for consumer in self._jobs.consumers:
            # When the daemon stops, plans end before mounts do.
            if consumer.position is not None and self._plan.has_consumer(consumer.key):
                found.setdefault(consumer.snapshot.id, []).append(_FollowedConsumer(consumer, consumer.position))
        return found


def _observe_reads(followed: Sequence[_FollowedConsumer], ids: Ids) -> None:
    """Let the consumers observe the reads of the blocks *ids*: shape (n,), int32. A consumer that fails is given up,
    and the others continue with the next report."""
    try:
        observe_reads([one.follower for one in followed], ids)
    except FollowerFailed as failure:
        cause = failure.__cause__ or failure
        for one in followed:
            if one.follower is failure.follower:
                one.consumer.fail(cause)


def _is_fetch_source(source: str) -> bool:
    """Return whether the block was on no tier of this node. source: of a stall (see cachefs.messages.Stall)."""
    return source == "origin" or source.startswith("peer ")


def _attribute_read(candidates: set[str], claiming: set[str]) -> ReadAttribution:
    """Return the job of a read that *candidates* may have done and *claiming* would do just now."""
    if len(claiming) == 1:
        return ReadAttribution(next(iter(claiming)), is_sure=True)
    return ReadAttribution("" if len(candidates) > 1 else next(iter(candidates), None), is_sure=False)


def _may_have_read(follower: SequenceFollower, ids: Ids) -> npt.NDArray[np.bool_]:
    """Return which of the blocks *ids* (shape (n,), int32) the consumer may have read just now: shape (n,), bool."""
    return follower.claim_reads(ids).is_own | follower.evidence.are_recent(ids)
