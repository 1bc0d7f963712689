"""Where a consumer is in its sequence, told from the blocks that are read.

Nobody says which read was whose, reads of pages the kernel has never show, and a loader's workers read out of order.
So a read is taken for a consumer's if its sequence has that block a little ahead of where the consumer was last (how
little, follows from its loader and from how much is read). As long as more reads fit than would by chance, the consumer
is followed. If they do not, the place at which the latest reads lie close together is looked for; where there is none,
the sequence is not what is being read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.ma  # the first np.unique imports it: 7 to 40 ms in which a job waits
import numpy.typing as npt

from cachefs.planning.blocks.space import Ids
from cachefs.planning.sequences.epoch import UNKNOWN, Epoch
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.tripwires import MISSING, FarOnes, are_tripwires, next_ones

# Reads that are judged together; out of how many of the latest a verdict is made.
CHUNK: Final = 32
MAX_CHUNKS: Final = 16
ENOUGH: Final = 48
# How far ahead reads may be beyond what the loader's workers and the number of reads explain.
SLACK: Final = 4
BEHIND: Final = 64
# A place is found where at least this share of the latest reads lies close together: within an eighth of the epoch at
# most, and so many standard deviations more than would by chance. Looking 20 times a second, anything less is found.
AGREEMENT: Final = 0.35
DEVIATIONS: Final = 8
FEWEST: Final = 8
# In a short epoch reads of anywhere lie ahead by chance. So many seen ones in a row explain no more than this part of
# it, or so many reads each; and tripwires prove nothing where so many of all that was read would lie there anyway:
# only nearer ones do, and where they are at least that part of what shows, as pages of most of the others are there.
PART: Final = 1 / 8
FEW: Final = 3
BY_CHANCE: Final = 1 / 4
MOSTLY: Final = 1 / 3
# Who was found where he was not is believed less from then on.
DISTRUST: Final = 0.1
MOST_DISTRUST: Final = 0.5
SPREADS: Final = (2, 4, 8, 16, 32)
LOWEST_DENSITY: Final = 0.05
FADING: Final = 0.9
RATE_SECONDS: Final = 3.0
# A rate that was reached is taken for possible for this long, though it may have become invisible since.
RATE_HALF_LIFE: Final = 10.0

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Claim:
    """Per block: reads: of the current epoch (or beyond its end: of the next); gaps: how far behind it the nearest read
    is that was done before it, inf where the block is not the consumer's."""

    reads: Places
    gaps: npt.NDArray[np.float64]

    @property
    def mine(self) -> npt.NDArray[np.bool_]:
        return np.isfinite(self.gaps)


class Follower:
    """One consumer. Reads are counted from the start of its epoch; see Plan.

    tolerance: reads by which the loader's workers may differ from the order; batch: reads that one of them does in
    order, 1 where that varies; following: False while what is read is something else; matched, mismatched: reads so
    far; rate: reads per second, 0 until it is known; demand: the same with the time spent waiting left out; begun: some
    read was its own; hidden: reads ahead of it per read that will show, as the pages of the others were pushed.
    """

    def __init__(self, plan: Plan, name: str, tolerance: int, batch: int = 1) -> None:
        self.name = name
        self.tolerance = tolerance
        self.batch = batch
        self.following = True
        self.begun = False
        self.matched = 0
        self.mismatched = 0
        self.rate = 0.0
        self.demand = 0.0
        self.hidden = 1.0
        self._plan = plan
        self._early = np.zeros(0, np.int64)  # reads that are done beyond the position
        self._high = 0
        self._recent = np.zeros(0, np.int32)
        self._judged = np.zeros(0, np.int32)
        self._fits = np.zeros(0, np.bool_)
        # Reads that showed of late, per read that was done: the page cache serves the rest.
        self._seen = self._gained = float(CHUNK)
        self._density = 1.0
        self._distrust = 0.0
        self._far = FarOnes()
        self._found_at = -ENOUGH * 8  # reads that were matched when it was last found
        self._done = 0
        self._waited = 0.0
        self._marks: list[tuple[float, int, float]] = []  # (when, reads done, seconds waited) of the last seconds
        self._said: tuple[int, int] = (0, 0)

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, read)."""
        return self._plan.place(self.name)

    @property
    def spread(self) -> int:
        """Reads between the first that is missing and the last that is done."""
        return max(0, self._high - self.place[1])

    def claim(self, ids: Ids) -> Claim:
        """Which of these blocks, read just now, are this consumer's?

        A loader's workers each read a batch in order, so a read follows closely on one of before, or begins a batch.
        Late ones are as good: a stranger's read that fitted may have pushed the position too far.
        """
        epoch, position = self.place
        reads = self._plan.expected(self.name, ids)
        gaps = np.full(len(ids), np.inf)
        front, step = max(position, self._high), self._step
        here = self._plan.epoch(self.name, epoch)
        reach = self.tolerance + self._explained(1 + len(ids))
        places = np.flatnonzero((reads >= position) & (reads < front + reach[-1]))
        if len(places):
            ahead = reads[places]
            done = np.sort(np.concatenate(([position - 1], self._early, ahead)))
            gap = (ahead - done[np.searchsorted(done, ahead) - 1]).astype(np.float64)
            length = len(here.blocks) if here is not None else 0
            begins = np.where(ahead >= length, ahead - length, ahead) % self.batch < step
            gap[(gap > step) & ~(begins & (ahead < front + self.tolerance))] = np.inf
            # Beyond the front by as much as so many reads explain.
            beyond = np.sort(ahead[np.isfinite(gap) & (ahead >= front)])
            within = np.flatnonzero(beyond < front + reach[: len(beyond)])
            gap[ahead > (beyond[within[-1]] if len(within) else front)] = np.inf
            gaps[places] = gap
        # Among them may be some of which an early read of the next epoch was as far ahead as a read may be.
        if here is not None and np.isinf(gaps).any():
            first = here.first[ids]
            late = np.flatnonzero(np.isinf(gaps) & (first < position) & (first >= position - self._behind))
            late = late[~self.knows(ids[late])] if len(late) else late
            reads[late] = first[late]
            gaps[late] = position - first[late]
        return Claim(reads, gaps)

    def knows(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these blocks it has read of late: they may be read once more, piece by piece."""
        return np.isin(ids, self._recent)

    def saw(self, ids: Ids, claim: Claim, strange: npt.NDArray[np.bool_]) -> None:
        """*ids* were read; strange: those that no consumer explains."""
        mine = claim.mine
        judged = mine | strange
        if not judged.any():
            return
        self.mismatched += int(np.count_nonzero(strange & ~mine))
        self._note(ids[judged], mine[judged])
        if mine.any() and self.following:
            self.begun = True
            self._advance(claim.reads[mine], claim.gaps[mine] <= self._step)
        self._judge()

    def told(self, epoch: int, position: int) -> None:
        """The consumer says that it has done *position* reads of *epoch*. Its loader may have read further."""
        current, done = self.place
        earlier = (epoch, position) < self._said
        self._said = (epoch, position)
        self.begun = True
        if epoch != current or earlier:
            if epoch == current + 1:
                self._count(position)
            self._jump(epoch, position)
        elif position > done:
            self._count(position - done)
            self._high = max(self._high, position)
            self._move(epoch, position)

    def tripped(self, ids: Ids, every: int, unseen: int = 0) -> "Passed":
        """*ids* were read. Those of them that are its next tripwires (see cachefs.planning.sequences.tripwires) say
        where it is. unseen: reads it may have done beyond what is known."""
        epoch, position = self.place
        here = self._plan.epoch(self.name, epoch)
        nothing = Passed(ids[:0], ids[:0])
        if not every or not self.following or here is None or not len(ids):
            return nothing
        length = len(here.blocks)
        reads = self._plan.expected(self.name, ids)
        in_epoch = np.where(reads >= length, reads - length, reads)
        arrived = np.flatnonzero((reads != UNKNOWN) & (reads >= position) & are_tripwires(in_epoch, every))
        wires = arrived[np.argsort(reads[arrived], kind="stable")]
        reach = self.tolerance + MISSING * max(every, self.hidden) + unseen
        believed = BY_CHANCE * length * every / (len(ids) * self._repetition)
        if reach > believed and len(wires) < MOSTLY * len(ids):
            return nothing
        passed = next_ones(reads[wires], max(position, self._high), min(reach, believed))
        if len(passed):
            self.begun = True
            before = ids[(reads >= position) & (reads <= passed[-1])]
            self._note(before, np.ones(len(before), np.bool_))
            self._pass(epoch, length, int(passed[-1]))
            self._far.clear()
            return Passed(ids[wires[: len(passed)]], before)
        for read in reads[arrived].tolist() if reach <= believed else ():
            if self._far.add(read, every, self.tolerance):
                self._far.clear()
                self._pass(epoch, length, read)
                break  # into the next epoch perhaps, where the others count from another start
        return nothing

    def _pass(self, epoch: int, length: int, read: int) -> None:
        """*read* is done, and so is all that its loader's workers cannot have left behind."""
        if read >= length:
            self._begin_epoch(epoch + 1, length)
            epoch, read = epoch + 1, read - length
        self._count(max(0, read + 1 - self._high))
        self._high = max(self._high, read + 1)
        _, position = self.place
        position = max(position, self._high - self.tolerance)
        self._early = self._early[self._early >= position]
        self._move(epoch, position)

    def believes(self, cluster: "Cluster") -> bool:
        return cluster.share >= AGREEMENT + self._distrust

    def found(self, epoch: int, cluster: "Cluster") -> None:
        """The latest reads lie there, in an epoch the plan knows by now."""
        self._settle(epoch, cluster)
        self._follow(True)

    def measure(self, now: float, waited: float, readers: int) -> None:
        """Time has passed. waited: seconds that its *readers* parallel readers have waited since the last call."""
        self._waited += waited
        self._marks.append((now, self._done, self._waited))
        while len(self._marks) > 2 and now - self._marks[1][0] >= RATE_SECONDS:
            del self._marks[0]
        since, done, waited_before = self._marks[0]
        span = now - since
        if span < 0.2 or self._done == done:
            return
        self.rate = (self._done - done) / span
        busy = max(0.1, 1 - (self._waited - waited_before) / max(1, readers) / span)
        faded = self.demand * 0.5 ** ((now - self._marks[-2][0]) / RATE_HALF_LIFE)
        self.demand = max(self.rate / busy, faded)

    @property
    def judged(self) -> Ids:
        """The latest reads that were its own, or nobody's."""
        return self._judged

    @property
    def share(self) -> float:
        """Of the latest reads, those that fitted; 1 before there were any."""
        return float(self._fits.mean()) if len(self._fits) else 1.0

    # --- the place ------------------------------------------------------------------------------------------------

    def _advance(self, reads: Places, follows: npt.NDArray[np.bool_]) -> None:
        """follows: where a read follows on another one: what only seems to begin a batch does not move the front."""
        epoch, position = self.place
        here = self._plan.epoch(self.name, epoch)
        if here is None:
            return
        length = len(here.blocks)
        beyond = reads[reads >= length]
        if len(beyond) > 1 or (len(beyond) and position >= length - 1):
            self._begin_epoch(epoch + 1, length)
            self._advance(beyond - length, follows[reads >= length])
            return
        self._seen = FADING * self._seen + len(reads)
        self._gained = FADING * self._gained
        here_and_now = (reads >= position) & (reads < length)
        reads, follows = reads[here_and_now], follows[here_and_now]
        if not len(reads):
            return
        high = max(self._high, int(reads[follows].max(initial=-1)) + 1)
        gained = high - self._high
        self._gained += max(0, gained)
        self._density = min(1.0, max(LOWEST_DENSITY, self._seen / max(1.0, self._gained)))
        self._count(max(0, gained))
        self._high = high
        # Once the slowest worker may have got further, what is missing was in the kernel's cache.
        floor = max(position, high - self.tolerance)
        early = np.union1d(self._early, reads) if len(self._early) else np.unique(reads)
        early = early[early >= floor]
        run = int(np.count_nonzero(early == floor + np.arange(len(early))))
        self._early = early[run:]
        self._move(epoch, floor + run)
        if len(self._early):
            self._plan.read_early(self.name, self._early)

    def _note(self, ids: Ids, fits: npt.NDArray[np.bool_]) -> None:
        """*ids*, of which some fit, were read, and say something of it."""
        self.matched += int(np.count_nonzero(fits))
        self._judged = np.concatenate((self._judged, ids))[-ENOUGH:]
        self._fits = np.concatenate((self._fits, fits))[-ENOUGH:]
        self._recent = np.concatenate((self._recent, ids[fits]))[-2 * (4 * ENOUGH + self.tolerance) :]

    def _begin_epoch(self, epoch: int, length: int) -> None:
        """length: reads of the one before, which are all done."""
        self._count(max(0, length - self._high))
        self._high, self._early = 0, np.zeros(0, np.int64)
        self._move(epoch, 0)

    def _move(self, epoch: int, position: int) -> None:
        self._plan.set_progress(self.name, epoch, position, self.demand)

    def _jump(self, epoch: int, position: int) -> None:
        self._high, self._early = position, np.zeros(0, np.int64)
        self._judged, self._fits = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        self._move(epoch, position)

    def _count(self, reads: int) -> None:
        self._done += reads

    # --- the verdict ----------------------------------------------------------------------------------------------

    @property
    def _step(self) -> float:
        """How far behind a read the one before it may be: what lies between was in the kernel's cache."""
        return max(SLACK + 2 / self._density, SLACK * self.hidden) * self._repetition

    def _explained(self, count: int) -> npt.NDArray[np.float64]:
        """How far ahead 1, 2, ... *count* reads that are seen may have brought it."""
        epoch, _ = self.place
        here = self._plan.epoch(self.name, epoch)
        part = PART * len(here.blocks) if here is not None else np.inf
        seen = np.arange(1, count + 1)
        explained: npt.NDArray[np.float64] = np.minimum(
            self._step * seen, np.maximum(FEW * self._repetition * seen, part)
        )
        return explained

    @property
    def _behind(self) -> float:
        """How far back a read may be that is late: its front may have been moved too far twice by others' reads."""
        return max(BEHIND * self._repetition, 2 * self._step)

    @property
    def _repetition(self) -> float:
        """Reads per block of the epoch: of those of one block in a row, only the first one shows."""
        epoch, _ = self.place
        here = self._plan.epoch(self.name, epoch)
        return len(here.blocks) / here.distinct if here is not None and here.distinct else 1.0

    def _judge(self) -> None:
        if len(self._fits) < ENOUGH or (self.following and self.share >= self._by_chance()):
            return
        if self.following and self.matched - self._found_at < 2 * ENOUGH:
            self._distrust = min(MOST_DISTRUST, self._distrust + DISTRUST)
        self._follow(self._resynchronise())

    def _follow(self, follow: bool) -> None:
        if follow != self.following:
            self.following = follow
            self._plan.suspend(self.name, not follow)

    def _by_chance(self) -> float:
        """The share of fitting reads below which the sequence says nothing."""
        epoch, _ = self.place
        here = self._plan.epoch(self.name, epoch)
        if here is None or not len(here.blocks):
            return 0.0
        places = self._behind + self._step * (1 + len(self._early) + self.tolerance / self.batch)
        return min(0.5, max(0.1, 3 * places / len(here.blocks)))

    def _resynchronise(self) -> bool:
        """Look for where the latest reads lie close together, in the epochs the plan knows."""
        current, _ = self.place
        best = Cluster(0.0, 0, 1.0)
        for number in (current, current + 1):
            epoch = self._plan.epoch(self.name, number)
            found = densest(epoch, self._judged, self.tolerance) if epoch is not None else best
            if found.share > best.share:
                best, current = found, number
        if not self.believes(best):
            return False
        self._settle(current, best)
        return True

    def _settle(self, epoch: int, cluster: "Cluster") -> None:
        self._jump(epoch, max(0, cluster.end - self.tolerance))
        self._high, self._density = cluster.end, cluster.density
        self._seen, self._gained = CHUNK * cluster.density, float(CHUNK)
        self._found_at = self.matched
        self.begun = True


def observe(followers: Sequence[Follower], ids: Ids) -> None:
    """*ids*, of the space that all of them read, were read, in this order. 0.1 ms per consumer and chunk."""
    size = max(CHUNK, len(ids) // MAX_CHUNKS)
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        claims = [follower.claim(chunk) for follower in followers]
        closest = np.full(len(chunk), np.inf)
        for follower, claim in zip(followers, claims, strict=True):
            if follower.following:
                np.minimum(closest, claim.gaps, out=closest)
        strange = np.isinf(closest)
        for follower in followers if strange.any() else ():
            if follower.following:
                strange[strange] = ~follower.knows(chunk[strange])
        for follower, claim in zip(followers, claims, strict=True):
            # What several claim is the one's whom it fits best.
            claim.gaps[claim.gaps > closest] = np.inf
            follower.saw(chunk, claim, strange)


@dataclass(frozen=True, slots=True)
class Passed:
    """wires: tripwires that a consumer has read; reads: these, and what it has read before them: of a block that it
    reads again later, one of those reads would seem to lie ahead by now."""

    wires: Ids
    reads: Ids


@dataclass(frozen=True, slots=True)
class Cluster:
    """share: of the reads that are in it; end: the read after its last one; density: reads seen per read done."""

    share: float
    end: int
    density: float


def densest(epoch: Epoch, ids: Ids, tolerance: int) -> Cluster:
    """Where in the epoch these reads lie closest together; a share of 0 where they do nowhere."""
    ids = ids[-max(FEWEST, len(epoch.blocks) // 16) :]
    reads = np.sort(epoch.first[ids])
    reads = reads[reads != UNKNOWN].astype(np.int64)
    repetition = len(epoch.blocks) / max(1, epoch.distinct)
    for spread in SPREADS:
        width = int(tolerance + repetition * spread * len(ids))
        chance = width / max(1, len(epoch.blocks))
        if len(reads) < FEWEST or chance > 1 / 8:
            break
        counts = np.searchsorted(reads, reads + width) - np.arange(len(reads))
        start = int(counts.argmax())
        share = float(counts[start]) / len(ids)
        if share >= max(AGREEMENT, chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / len(ids))):
            last = start + int(counts[start]) - 1
            density = max(LOWEST_DENSITY, min(1.0, float(counts[start]) / max(1, reads[last] + 1 - reads[start])))
            # Where few reads show, the width may end in the middle of them.
            apart = np.diff(reads[last:], append=np.inf) > SLACK / density
            return Cluster(share, int(reads[last + int(apart.argmax())]) + 1, density)
    return Cluster(0.0, 0, 1.0)
