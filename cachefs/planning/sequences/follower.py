"""Follows the position of a consumer in its sequence by the blocks that are read.

Reads do not name their consumer, reads of cached pages are not observed, and a loader's workers read out of order. A
read is therefore attributed to a consumer if its sequence has the block slightly ahead of its last position. The
permitted distance depends on its loader and on how much is read. As long as more reads fit than would by chance, the
consumer is followed. Otherwise the follower searches for a position around which the latest reads lie close together.
Where there is none, something other than the sequence is being read.

Reads are counted from the start of the consumer's epoch (see cachefs.planning.sequences.plan).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

import numpy as np
import numpy.ma  # np.unique imports it on first use, which would take 7 to 40 ms of a job's wait
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.rate import ReadRate
from cachefs.planning.sequences.search import (
    DEVIATIONS,
    MIN_CLUSTER_READS,
    NO_CLUSTER,
    VERDICT_READS,
    Evidence,
    ObservedShare,
    ReadCluster,
    find_densest,
)
from cachefs.planning.sequences.timeline import UNKNOWN_READ, PlannedEpoch
from cachefs.planning.sequences.tripwires import MAX_MISSING, FarTripwires, are_tripwires, next_tripwires

# Reads that are judged together, and most parts into which a report is divided.
CHUNK_READS: Final = 32
MAX_CHUNKS: Final = 16
# Parts of reports after which an unattributed read is forgotten: about as many as a mount has workers.
STRAY_CHUNKS: Final = 4
# A read that begins a batch fits as well as one that follows another with this gap: batches that may begin are about as
# many as done reads whose next read is not done.
BATCH_BEGIN_DOUBT: Final = 1.5
# The worst fit: a read close to other reads of the report, with no other evidence for its consumer. Of two jobs with
# 1,200 samples each, the one that rested between epochs was moved on by two such reads, its samples were evicted before
# it had read them, and half of both jobs' reads came late.
VAGUE_DOUBT: Final = 1e6
# How far back a late read may be, in reads of different blocks.
MAX_BEHIND: Final = 64
# In a short epoch a random read may lie slightly ahead of the consumer by chance. The next four constants therefore
# limit what reads and tripwires prove. Observed reads, however many, move the consumer on by no more than this part of
# the epoch.
MAX_ADVANCE_SHARE: Final = 1 / 8
# But that limit is at least this many reads of different blocks for each observed read.
MIN_ADVANCE_PER_READ: Final = 3
# Tripwires prove nothing beyond the distance within which this many of the read blocks would be tripwires by chance, on
# average.
CHANCE_TRIPWIRES: Final = 1 / 4
# Where the next tripwires may lie beyond that distance, nearer ones count only if tripwires are at least this part of
# the observed reads: pages of most other blocks are then in the page cache.
TRIPWIRE_SHARE: Final = 1 / 3

# Share of fitting reads from which a consumer is followed again at its last position without a search, where chance
# explains less.
FITTING_SHARE: Final = 2 / 3

# Reads, counted from the start of an epoch.
ReadNumbers = npt.NDArray[np.int64]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ReadClaim:
    """The blocks of a report that a consumer claims as its reads."""

    # The read that each block would be, of the current epoch or, beyond its end, of the next: shape (n,), int64.
    reads: ReadNumbers
    # Distance of each read from the nearest earlier read that is done; inf where the block is not the consumer's: shape
    # (n,), float64.
    gaps: npt.NDArray[np.float64]
    # How badly each fits, compared with other consumers' claims; inf where it is not the consumer's: the gap, but less
    # for a read that begins a batch, far from all done reads, and VAGUE_DOUBT where only reads near it in the report
    # support it. Shape (n,), float64.
    doubts: npt.NDArray[np.float64]

    @property
    def is_own(self) -> npt.NDArray[np.bool_]:
        """Whether each block is the consumer's: shape (n,), bool."""
        return np.isfinite(self.gaps)


@dataclass(frozen=True, slots=True)
class PassedTripwires:
    """The evidence of tripwires for a consumer's position."""

    # Tripwires that it has read, as blocks: one dimension, int32.
    wires: Ids
    # The same blocks, and those that it has read before them: one dimension, int32. These reads must not be examined
    # again: where the consumer reads such a block again later, this read would be taken for the later one.
    reads: Ids


class _ReadFront:
    """Reads beyond a consumer's position that are done, by workers of its loader that are ahead of the others."""

    __slots__ = ("early", "high")

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, high: int) -> None:
        """Forget all reads beyond the position."""
        self.high = high  # the read after the last done one
        self.early = np.zeros(0, np.int64)  # done reads beyond the position, in ascending order

    def add(self, reads: ReadNumbers, floor: int) -> int:
        """Add done *reads* (shape (n,), int64, in any order), and all reads before read *floor*. Returns the resulting
        position: all reads before it are done."""
        early = np.union1d(self.early, reads) if len(self.early) else np.unique(reads)
        early = early[early >= floor]
        run = int(np.count_nonzero(early == floor + np.arange(len(early))))
        self.early = early[run:]
        return floor + run


class _WorkerSpread:
    """Remembers how far apart a loader's workers were in their last round of batches.

    When all workers have just finished their batches, no read lies between them, and a moment later they begin the next
    batches, as far apart as before.
    """

    __slots__ = ("_batch", "_left", "widest")

    def __init__(self, batch: int) -> None:
        self.widest = 0  # most reads between the first missing and the last done one
        self._batch = batch  # reads that a worker does in order
        self._left = 0  # reads for which `widest` is remembered

    def note(self, span: int, reads: int) -> None:
        """Record the distance *span* after *reads* more reads."""
        self._left -= reads
        if span >= self.widest or self._left <= 0:
            self.widest, self._left = span, span + self._batch


class _StrayReads:
    """The latest unattributed reads. A mount's workers report separately, so a part of a batch may be reported before
    earlier reads, and fits only after these. Where such a read was lost, its consumer's position stayed behind for as
    many reads as its loader may be ahead by: 1.7 s at a time."""

    __slots__ = ("_ages", "ids")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.ids = np.zeros(0, np.int32)  # blocks of the reads
        self._ages = np.zeros(0, np.int64)  # calls of `add` since each of them

    def add(self, ids: Ids) -> None:
        """Add unattributed reads, and forget the oldest."""
        if len(ids) or len(self.ids):
            kept = self._ages < STRAY_CHUNKS
            self.ids = np.concatenate([self.ids[kept], ids])
            self._ages = np.concatenate([self._ages[kept] + 1, np.zeros(len(ids), np.int64)])

    def drop(self, found: npt.NDArray[np.bool_]) -> None:
        """Remove reads that were attributed. found: shape (strays,), bool."""
        self.ids, self._ages = self.ids[~found], self._ages[~found]


class SequenceFollower:
    """Follows one consumer of a plan that knows at least one epoch of it."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        reorder_window: int,
        batch: int = 1,
        own: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """own: which blocks its samples have, shape (blocks of the space,), bool; None: all."""
        self.name = name  # in the plan
        self.reorder_window = reorder_window  # reads by which the loader's workers may differ from the order
        self.batch = batch  # reads that one worker does in order, 1 where that varies
        self.is_following = True  # False while something other than the sequence is read
        self.has_begun = False  # True once a read was attributed to it, or it has reported its position
        self.rate = ReadRate(reorder_window)
        self.evidence = Evidence(reorder_window)
        self.observed_share = ObservedShare()
        self._plan = plan
        self._own = own
        self._front = _ReadFront()
        self._spread = _WorkerSpread(batch)
        self._strays = _StrayReads()
        self._far_tripwires = FarTripwires()
        self._last_heartbeat = (0, 0)  # the last reported position

    @property
    def progress(self) -> tuple[int, int]:
        """(epoch, reads of it that are done)."""
        return self._plan.progress(self.name)

    @property
    def span(self) -> int:
        """Reads between the first missing and the last done one."""
        return max(0, self._front.high - self.progress[1])

    def reach(self, reads: float) -> int:
        """Return how many reads beyond its position, without the *reads* it does next, its furthest worker may be then.

        Workers that finish their batches together begin the next ones together, as far apart as before.
        """
        span = self.span
        widest = max(span, self._spread.widest)
        left = self.batch - self.progress[1] % self.batch
        workers = 1 + widest // self.batch
        if 1 < self.batch < span and left * workers <= reads:
            return max(span, min(span + left + widest, self.reorder_window))
        return widest

    # --- what is read -----------------------------------------------------------------------------------------------

    def claim_reads(self, ids: Ids, contested: bool = False) -> ReadClaim:
        """Return which of the blocks *ids* (shape (n,), int32), read just now in this order, may be this consumer's.
        contested: whether other consumers claim some of them too.

        A loader's workers each read a batch in order, so a read closely follows an earlier one, or begins a batch. Late
        reads count as well: a fitting read of another process may have moved the position too far.
        """
        epoch, position = self.progress
        here = self._plan.epoch(self.name, epoch)
        reads = self._plan.next_reads(self.name, ids)
        gaps = np.full(len(ids), np.inf)
        doubts = gaps.copy() if contested else gaps
        front, step = max(position, self._front.high), self._max_step(here)
        reach = self.reorder_window + _explained_distance(1 + len(ids), step, here)
        indices = np.flatnonzero((reads >= position) & (reads < front + reach[-1]))
        if len(indices):
            ahead = reads[indices]
            done = np.concatenate(([position - 1], self._front.early))
            known = np.sort(np.concatenate((done, ahead)))
            gap = (ahead - known[np.searchsorted(known, ahead) - 1]).astype(np.float64)
            length = len(here.blocks) if here is not None else 0
            offsets = np.where(ahead >= length, ahead - length, ahead) % self.batch
            begins = (offsets < step) & (ahead < front + self.reorder_window)
            gap[(gap > step) & ~begins] = np.inf
            if contested:
                doubt = np.where(begins, np.minimum(gap, BATCH_BEGIN_DOUBT + offsets), gap) if self.batch > 1 else gap
                doubts[indices] = np.where(_are_supported(done, ahead, begins, step), doubt, VAGUE_DOUBT)
            # Reads may lie beyond the front by as much as their number explains.
            beyond = np.sort(ahead[np.isfinite(gap) & (ahead >= front)])
            within = np.flatnonzero(beyond < front + reach[: len(beyond)])
            gap[ahead > (beyond[within[-1]] if len(within) else front)] = np.inf
            gaps[indices] = gap
        # The rest may include late reads, where an early read of the next epoch would have been within reach.
        if here is not None and np.isinf(gaps).any():
            first = here.first[ids]
            # All of a report may be late that was delayed on a busy machine, while others moved the position on.
            behind = max(_max_behind(step, here), self.reorder_window)
            late = np.flatnonzero(np.isinf(gaps) & (first < position) & (first >= position - behind))
            late = late[~self.evidence.are_recent(ids[late])] if len(late) else late
            reads[late] = first[late]
            gaps[late] = doubts[late] = position - first[late]
        doubts[np.isinf(gaps)] = np.inf
        return ReadClaim(reads, gaps, doubts)

    def are_own(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of the blocks *ids* (shape (n,), int32) its samples have: shape (n,), bool. Reads of other
        blocks are no evidence: they belong to another reader, such as a job's other loader that published nothing."""
        return np.ones(len(ids), np.bool_) if self._own is None else self._own[ids]

    def on_reads(self, ids: Ids, claim: ReadClaim, unattributed: npt.NDArray[np.bool_]) -> None:
        """Process reads of the blocks *ids* (shape (n,), int32), in this order. claim: this consumer's claim of them;
        unattributed: those without a consumer, shape (n,), bool."""
        mine = claim.is_own
        judged = mine | (unattributed if self._own is None else unattributed & self._own[ids])
        if not judged.any():
            return
        self.evidence.add_reads(ids[judged], mine[judged])
        if mine.any() and self.is_following:
            self.has_begun = True
            self._advance(claim.reads[mine], claim.gaps[mine] <= self._max_step(self._here))
            self._claim_strays()
        if self.batch > 1:  # with batches of 1, all reads within reach fit at once
            self._strays.add(ids[unattributed & ~mine])
        self._judge()

    def _claim_strays(self) -> None:
        """Attribute stray reads to the consumer that fit by now."""
        strays = self._strays.ids
        if len(strays):
            again = self.claim_reads(strays)
            if again.is_own.any():
                self._strays.drop(again.is_own)
                self._advance(again.reads[again.is_own], again.gaps[again.is_own] <= self._max_step(self._here))

    def on_heartbeat(self, epoch: int, position: int) -> None:
        """Process the consumer's report of *position* done reads of *epoch*. Its loader may have read further."""
        current, done = self.progress
        earlier = (epoch, position) < self._last_heartbeat
        self._last_heartbeat = (epoch, position)
        self.has_begun = True
        if epoch != current or earlier:
            if epoch == current + 1:
                self.rate.count_reads(position)
            self._jump(epoch, position)
        elif position > done:
            self.rate.count_reads(position - done)
            self._front.high = max(self._front.high, position)
            self._set_progress(epoch, position)

    def measure_rate(self, now: float, waited: float, readers: int) -> None:
        """Measure the consumer's rate, as `ReadRate.measure`, and pass it to the plan. Margins are seconds at this
        rate: with 50 reads per second, while the plan still used the initial guess of 1,000, 20 reads became 400, and
        more was fetched ahead than the tiers keep."""
        self.rate.measure(now, waited, readers)
        if self._here is not None:
            self._plan.set_progress(self.name, *self.progress, self.rate.demand)

    def reads_ahead(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Return how far ahead of its done reads the consumer reads each of the blocks *ids* (shape (n,), int32), in
        reads: shape (n,), float64, inf where it does not."""
        _, position = self.progress
        reads = self._plan.next_reads(self.name, ids)
        coming = self.is_following & (reads != UNKNOWN_READ) & (reads >= position)
        return np.where(coming, np.maximum(0.0, reads - max(position, self._front.high)), np.inf)

    def on_tripwires(self, ids: Ids, interval: int, unseen: int = 0) -> PassedTripwires:
        """Process reads of the blocks *ids* (shape (n,), int32). Those among them that are the consumer's next
        tripwires (see cachefs.planning.sequences.tripwires) determine its position.

        interval: reads from one tripwire to the next, 0 where there are none; unseen: reads that the consumer may have
        done beyond the known ones.
        """
        epoch, position = self.progress
        here = self._plan.epoch(self.name, epoch)
        nothing = PassedTripwires(ids[:0], ids[:0])
        if not interval or not self.is_following or here is None or not len(ids):
            return nothing
        length = len(here.blocks)
        reads = self._plan.next_reads(self.name, ids)
        in_epoch = np.where(reads >= length, reads - length, reads)
        arrived = np.flatnonzero((reads != UNKNOWN_READ) & (reads >= position) & are_tripwires(in_epoch, interval))
        wires = arrived[np.argsort(reads[arrived], kind="stable")]
        reach = self.reorder_window + MAX_MISSING * max(interval, self.observed_share.hidden_ratio) + unseen
        believed = CHANCE_TRIPWIRES * length * interval / (len(ids) * here.repetition)
        if reach > believed and len(wires) < TRIPWIRE_SHARE * len(ids):
            return nothing
        passed = next_tripwires(reads[wires], max(position, self._front.high), min(reach, believed))
        if len(passed):
            self.has_begun = True
            before = ids[(reads >= position) & (reads <= passed[-1])]
            self.evidence.add_reads(before, np.ones(len(before), np.bool_))
            self._pass_tripwire(epoch, length, int(passed[-1]))
            self._far_tripwires.clear()
            return PassedTripwires(ids[wires[: len(passed)]], before)
        for read in reads[arrived].tolist() if reach <= believed else ():
            if self._far_tripwires.add_tripwire(read, interval, self.reorder_window):
                self._far_tripwires.clear()
                self._pass_tripwire(epoch, length, read)
                break  # possibly into the next epoch, where the other reads are counted from another start
        return nothing

    def on_found(self, epoch: int, cluster: ReadCluster) -> None:
        """Move to a cluster of reads that a search has found, in an epoch that the plan knows."""
        self._settle(epoch, cluster)
        self._set_following(True)

    # --- the place ------------------------------------------------------------------------------------------------

    def _advance(self, reads: ReadNumbers, follows: npt.NDArray[np.bool_]) -> None:
        """Record done *reads*. follows: which of them follow another read; a read that may begin a batch does not move
        the front."""
        epoch, position = self.progress
        here = self._plan.epoch(self.name, epoch)
        if here is None:
            return
        length = len(here.blocks)
        beyond = reads[reads >= length]
        if len(beyond) > 1 or (len(beyond) and position >= length - 1):
            self._begin_epoch(epoch + 1, length)
            self._advance(beyond - length, follows[reads >= length])
            return
        self.observed_share.on_reads(len(reads))
        here_and_now = (reads >= position) & (reads < length)
        reads, follows = reads[here_and_now], follows[here_and_now]
        if not len(reads):
            return
        high = max(self._front.high, int(reads[follows].max(initial=-1)) + 1)
        gained = high - self._front.high
        self.observed_share.on_advance(gained)
        self.rate.count_reads(max(0, gained))
        self._front.high = high
        # Beyond the reach of the slowest worker, missing reads were answered from the kernel's cache.
        self._set_progress(epoch, self._front.add(reads, max(position, high - self.reorder_window)))
        self._spread.note(self.span, len(reads))
        if len(self._front.early):
            self._plan.note_early_reads(self.name, self._front.early)

    def _pass_tripwire(self, epoch: int, length: int, read: int) -> None:
        """Record *read* as done, and all reads that its loader's workers cannot have left behind."""
        if read >= length:
            self._begin_epoch(epoch + 1, length)
            epoch, read = epoch + 1, read - length
        front = self._front
        self.rate.count_reads(max(0, read + 1 - front.high))
        front.high = max(front.high, read + 1)
        _, position = self.progress
        position = max(position, front.high - self.reorder_window)
        front.early = front.early[front.early >= position]
        self._set_progress(epoch, position)

    def _begin_epoch(self, epoch: int, length: int) -> None:
        """Begin an epoch. length: reads of the previous one, which are all done."""
        self.rate.count_reads(max(0, length - self._front.high))
        self._front.restart(0)
        self._strays.clear()
        self._set_progress(epoch, 0)

    def _set_progress(self, epoch: int, position: int) -> None:
        self._plan.set_progress(self.name, epoch, position, self.rate.demand)

    def _jump(self, epoch: int, position: int) -> None:
        self._front.restart(position)
        self._spread = _WorkerSpread(self.batch)
        self._strays.clear()
        self.evidence.clear()
        self._set_progress(epoch, position)

    # --- the verdict ----------------------------------------------------------------------------------------------

    @property
    def _here(self) -> PlannedEpoch | None:
        """The current epoch; None where the plan does not know it."""
        return self._plan.epoch(self.name, self.progress[0])

    def _max_step(self, here: PlannedEpoch | None) -> float:
        """Return the most reads between two observed reads; those between were answered from the kernel's cache."""
        return self.observed_share.max_step * (here.repetition if here is not None else 1.0)

    def _judge(self) -> None:
        evidence = self.evidence
        if not self.has_begun and not evidence.is_enough and evidence.mismatched >= MIN_CLUSTER_READS:
            self._resynchronise()  # early: until then its epoch is fetched from the start, though it may resume later
        if not evidence.is_enough:
            return
        # A consumer that was lost among reads of others, such as a rank without a publication yet, continues where most
        # reads fit again.
        if evidence.share >= (self._chance_share() if self.is_following else self._confirming_share()):
            self._set_following(True)
            return
        if self.is_following:
            evidence.on_lost()
        self._set_following(self._resynchronise())

    def _set_following(self, follow: bool) -> None:
        if follow != self.is_following:
            self.is_following = follow
            self._plan.suspend(self.name, not follow)

    def _chance_share(self) -> float:
        """Return the share of fitting reads below which the sequence explains nothing."""
        here = self._here
        if here is None or not len(here.blocks):
            return 0.0
        step = self._max_step(here)
        fitting_reads = _max_behind(step, here) + step * (1 + len(self._front.early) + self.reorder_window / self.batch)
        return min(0.5, max(0.1, 3 * fitting_reads / len(here.blocks)))

    def _confirming_share(self) -> float:
        """Return the share of fitting reads that confirms the followed position."""
        here = self._here
        if here is None or not len(here.blocks):
            return 1.0
        chance = min(1.0, (_max_behind(self._max_step(here), here) + self.reorder_window) / len(here.blocks))
        return max(FITTING_SHARE, chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / VERDICT_READS))

    def _resynchronise(self) -> bool:
        """Search the known epochs for the place around which the latest reads lie close together. Returns whether
        found."""
        current, _ = self.progress
        best = NO_CLUSTER
        for number in (current, current + 1):
            epoch = self._plan.epoch(self.name, number)
            found = find_densest(epoch, self.evidence.judged, self.reorder_window) if epoch is not None else best
            if found.share > best.share:
                best, current = found, number
        if not self.evidence.is_credible(best):
            return False
        self._settle(current, best)
        return True

    def _settle(self, epoch: int, cluster: ReadCluster) -> None:
        self._jump(epoch, max(0, cluster.end - self.reorder_window))
        self._front.high = cluster.end
        self.observed_share.reset(cluster.density)
        self.evidence.on_found()
        self.has_begun = True


class FollowerFailed(Exception):
    """A follower has failed, with the cause of this exception. The others can go on without it."""

    def __init__(self, follower: SequenceFollower) -> None:
        super().__init__(follower.name)
        self.follower = follower


def observe_reads(followers: Sequence[SequenceFollower], ids: Ids) -> None:
    """Process reads of the blocks *ids* (shape (n,), int32) of the followers' common space, in this order. Takes 0.1 ms
    per consumer and chunk. Raises FollowerFailed; the other followers then miss the rest."""
    size = max(CHUNK_READS, len(ids) // MAX_CHUNKS)
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        claims = [_guarded(follower, follower.claim_reads, chunk, len(followers) > 1) for follower in followers]
        closest = np.full(len(chunk), np.inf)
        for follower, claim in zip(followers, claims, strict=True):
            if follower.is_following:
                np.minimum(closest, claim.doubts, out=closest)
        unattributed = np.isinf(closest)
        for follower in followers if unattributed.any() else ():
            if follower.is_following:
                unattributed[unattributed] = ~follower.evidence.are_recent(chunk[unattributed])
        for follower, claim in zip(followers, claims, strict=True):
            # A read that several consumers claim belongs to the best fit.
            claim.gaps[claim.doubts > closest] = np.inf
            _guarded(follower, follower.on_reads, chunk, claim, unattributed)


def _guarded(
    follower: SequenceFollower, step: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Call a step of one follower. Raises FollowerFailed."""
    try:
        return step(*arguments, **named)
    except Exception as error:
        raise FollowerFailed(follower) from error


def _are_supported(
    done: ReadNumbers, ahead: ReadNumbers, begins: npt.NDArray[np.bool_], step: float
) -> npt.NDArray[np.bool_]:
    """Return which of the reads *ahead* (shape (n,), int64) begin a batch, or follow in a chain on a done read or on
    one that begins a batch: shape (n,), bool. Two reads of another process that are adjacent by chance do not.

    done: reads that were done before; begins: which of *ahead* may begin a batch, shape (n,), bool; step: most distance
    between two reads of a chain.
    """
    reads = np.concatenate((done, ahead))
    order = np.argsort(reads, kind="stable")
    roots = np.concatenate((np.ones(len(done), np.bool_), begins))[order]
    count = np.cumsum(roots)
    # Number of roots before the chain of each read.
    before = np.maximum.accumulate(np.where(np.diff(reads[order], prepend=0) > step, count - roots, 0))
    firm = np.empty(len(reads), np.bool_)
    firm[order] = count > before
    return firm[len(done) :]


def _explained_distance(count: int, step: float, here: PlannedEpoch | None) -> npt.NDArray[np.float64]:
    """Return how far ahead 1, 2, ... *count* observed reads may have brought a consumer: shape (count,), float64."""
    repetition = here.repetition if here is not None else 1.0
    part = MAX_ADVANCE_SHARE * len(here.blocks) if here is not None else np.inf
    seen = np.arange(1, count + 1)
    explained: npt.NDArray[np.float64] = np.minimum(
        step * seen, np.maximum(MIN_ADVANCE_PER_READ * repetition * seen, part)
    )
    return explained


def _max_behind(step: float, here: PlannedEpoch) -> float:
    """Return how far back a late read may be: others' reads may have moved the front too far twice."""
    return max(MAX_BEHIND * here.repetition, 2 * step)
