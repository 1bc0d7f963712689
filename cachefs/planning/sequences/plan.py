"""The plan: the next read of each block of this node according to the published sequences.

Time is counted in *reads*: a consumer reads one block after the other, `blocks[0]`, `blocks[1]`, ..., at a certain
rate. For each block the plan keeps each consumer's next read of it. Divided by the consumer's rate that gives seconds,
and the minimum over consumers is the block's next use. Beyond the last published epoch there are only expectations.

Only the event loop changes a plan. Policies read it from other threads without a lock. They see one `KnownFuture` per
consumer, which is replaced as a whole. Only the entries of its array change in place, and each entry is consistent by
itself, before or after the last progress.

Measured with 1.3 million blocks and 8 consumers (processor time, 2 busy cores). Ranks that share the dataset: an epoch
of all 8 takes 20 to 55 ms and 47 MB to publish; 8 jobs that each read all of it: 90 to 160 ms, 12 to 20 ms each, and 83
MB. 5 MB more per consumer for its next reads. Progress of 100 reads takes 14 us, the next use of 256 keys 0.15 ms and
of all blocks 40 to 55 ms, a jump 1 to 8 ms.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids, Numbers
from cachefs.planning.sequences.timeline import ConsumerTimeline, KnownFuture, PlannedEpoch, ReadWindow, Seconds

# Blocks per part, so that intermediate results stay in a processor's cache: twice as fast as a million at once.
BLOCKS_PER_PART: Final = 1 << 14

# Most remaining reads of an epoch that are still processed one by one when a consumer is in the next epoch. With 14
# million that takes 1 s; planning anew takes 0.03 s.
_MAX_LEAP: Final = 1 << 20

# Most consumers of a snapshot that are compared to find the job that reads a block next: 2 us each.
_MAX_COMPARED: Final = 32

# Progress reports that are remembered for policies that poll the plan.
_MAX_CONSUMED: Final = 1024


def job_of_consumer(consumer: str) -> str:
    """Return the name of the job of a consumer, from the consumer's name in the plan: the part before the slash."""
    return consumer.partition("/")[0]


class Plan:
    """All consumers of a node and their timelines. Consumer names are unique.

    One group of methods records events; the others, which change nothing, serve policies, prefetcher and pushers.
    """

    def __init__(self) -> None:
        # Counts changes other than a consumer reading on in its epoch; each voids earlier results.
        self.version = 0
        # By snapshot. This and the next three are replaced, never changed: other threads iterate over them.
        self._spaces: dict[str, BlockSpace] = {}
        # (snapshot, other snapshot): number in the other snapshot of each block of the first.
        self._counterparts: dict[tuple[str, str], Ids] = {}
        self._timelines: dict[str, ConsumerTimeline] = {}  # by consumer
        # By snapshot: consumers with published epochs that are not suspended.
        self._active: dict[str, tuple[ConsumerTimeline, ...]] = {}
        # By snapshot and job: the same.
        self._active_jobs: dict[str, dict[str, list[ConsumerTimeline]]] = {}
        # (number, snapshot, blocks): recently read blocks.
        self._consumed: deque[tuple[int, str, Ids]] = deque(maxlen=_MAX_CONSUMED)
        self._progress_count = 0  # next number in `_consumed`

    # --- what happens -----------------------------------------------------------------------------------------------

    def add_space(self, space: BlockSpace) -> None:
        """Accept sequences of blocks of *space*, identified by its snapshot's id.

        Takes 0.3 s per million blocks to find common blocks where there are other spaces.
        """
        counterparts = dict(self._counterparts)
        for snapshot, other in self._spaces.items():
            for one, two in ((space, other), (other, space)):
                common = one.counterparts(two) if snapshot != space.snapshot else None
                if common is not None:
                    counterparts[one.snapshot, two.snapshot] = common
        self._counterparts = counterparts
        self._spaces = {**self._spaces, space.snapshot: space}
        self._update_active()

    def remove_space(self, snapshot: str) -> None:
        """Forget the space of *snapshot*, and all consumers that read it."""
        self._spaces = {known: one for known, one in self._spaces.items() if known != snapshot}
        self._counterparts = {pair: common for pair, common in self._counterparts.items() if snapshot not in pair}
        self._timelines = {name: one for name, one in self._timelines.items() if one.space.snapshot != snapshot}
        self._update_active()

    def set_epoch(
        self, consumer: str, snapshot: str, epoch: int, blocks: npt.NDArray[np.integer], *, is_last: bool = False
    ) -> None:
        """Set the order in which *consumer* reads blocks in *epoch*: their numbers in the snapshot's space, shape
        (reads,), any integer type. is_last: no epoch follows.

        Publish the current epoch and the next: each costs 4 bytes per read and per block of the space. A new consumer
        starts with the first epoch that is set.

        Raises KeyError for an unknown snapshot, ValueError for blocks it does not have.
        """
        self.set_prepared_epoch(consumer, snapshot, epoch, PlannedEpoch.of(blocks, self._spaces[snapshot], is_last))

    def set_prepared_epoch(self, consumer: str, snapshot: str, epoch: int, published: PlannedEpoch) -> None:
        """Set an epoch as `set_epoch`. published: the result of `PlannedEpoch.of`, which takes longest (0.3 s for 14
        million reads) and may be called in any thread. Raises KeyError for an unknown snapshot."""
        space = self._spaces[snapshot]
        course = self._timelines.get(consumer)
        if course is None or course.space is not space:
            course = ConsumerTimeline.at_epoch(space, epoch)
            self._timelines = {**self._timelines, consumer: course}
        follows = epoch > max(course.epochs, default=epoch)
        course.epochs = {**course.epochs, epoch: published}
        if follows and course.current_epoch is not None:
            course.extend_future()
        else:
            course.replan(course.epoch_number, course.future.position)
        self._update_active()

    def set_progress(self, consumer: str, epoch: int, position: int, rate: float = 0.0) -> None:
        """Record that *consumer* has done *position* reads of *epoch*, at *rate* reads per second (0: unchanged).
        Reading on costs microseconds; any other change recomputes its future. Unknown consumers are ignored."""
        course = self._timelines.get(consumer)
        if course is None:
            return
        course.set_rate(rate)
        if epoch == course.epoch_number and course.current_epoch is not None and position >= course.future.position:
            self._note_consumed(course, course.advance(position))
        elif (
            epoch == course.epoch_number + 1
            and epoch in course.epochs
            and course.current_epoch is not None
            and course.future.length - course.future.position <= _MAX_LEAP
        ):
            self._note_consumed(course, course.advance(len(course.current_epoch.blocks)))
            course.begin_next_epoch()
            self.version += 1
            self._note_consumed(course, course.advance(position))
        else:
            course.replan(epoch, max(0, position))
            self._update_active()

    def note_early_reads(self, consumer: str, reads: npt.NDArray[np.integer], *, is_next_epoch: bool = False) -> None:
        """Record that reads of *consumer*'s current epoch beyond its position are done: shape (n,), any integer type,
        in ascending order. is_next_epoch: reads of its next epoch, which must be repeated once it begins. Unknown
        consumers and reads are ignored."""
        course = self._timelines.get(consumer)
        if course is None or course.current_epoch is None:
            return
        if is_next_epoch:
            self._note_consumed(course, course.mark_done_ahead(reads))
            return
        now = course.future
        self._note_consumed(course, course.mark_done(reads[(reads >= now.position) & (reads < now.length)]))

    def suspend(self, consumer: str, is_suspended: bool) -> None:
        """Exclude a consumer from the plan, or take it back."""
        course = self._timelines.get(consumer)
        if course is not None and course.is_suspended != is_suspended:
            course.is_suspended = is_suspended
            self._update_active()

    def remove_consumer(self, consumer: str) -> None:
        """Forget *consumer* and its future. Unknown consumers are ignored."""
        if consumer in self._timelines:
            self._timelines = {name: one for name, one in self._timelines.items() if name != consumer}
            self._update_active()

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True where no consumer's future is known."""
        return not self._active

    @property
    def spaces(self) -> dict[str, BlockSpace]:
        """The spaces by snapshot. Not to be changed."""
        return self._spaces

    def job_of_next_read(self, snapshot: str, key: bytes) -> str:
        """Return the job that reads a block of *snapshot* next; "" where none does, as far as is known."""
        jobs = self._active_jobs.get(snapshot, {})
        if len(jobs) < 2:
            return next(iter(jobs), "")
        if (number := self._spaces[snapshot].find(key)) < 0:
            return ""
        ids, each = np.array([number]), max(1, _MAX_COMPARED // len(jobs))
        soonest = {
            job: min(float(course.future.seconds(ids)[0]) for course in courses[:each]) for job, courses in jobs.items()
        }
        return min(soonest, key=soonest.__getitem__)

    def next_use(self, keys: Sequence[bytes]) -> Seconds:
        """Return the seconds until each block is read next, as of the last progress: shape (keys,), float64. inf:
        never, or unknown."""
        soonest = np.full(len(keys), np.inf)
        for snapshot in self._active:
            space = self._spaces.get(snapshot)
            if space is not None:
                ids = space.ids(keys)
                here = np.flatnonzero(ids >= 0)
                soonest[here] = np.minimum(soonest[here], self.next_use_of(snapshot, ids[here]))
        return soonest

    def next_use_of(self, snapshot: str, ids: Numbers) -> Seconds:
        """Return `next_use` of blocks of one snapshot by their numbers (shape (n,)), by readers of any snapshot: shape
        (n,), float64."""
        soonest = np.full(len(ids), np.inf)
        for start in range(0, len(ids), BLOCKS_PER_PART):
            part = soonest[start : start + BLOCKS_PER_PART]
            for future, where, theirs in self.futures(snapshot, ids[start : start + BLOCKS_PER_PART]):
                part[where] = np.minimum(part[where], future.seconds(theirs))
        return soonest

    def futures(
        self, snapshot: str, ids: Numbers
    ) -> Iterator[tuple[KnownFuture, "slice | npt.NDArray[np.int64]", Numbers]]:
        """Yield all consumers that may read some of the blocks *ids* (shape (n,)).

        For each: its future; which of *ids* it may read, as a slice or as indices into *ids* (shape (m,), int64); and
        the numbers of those blocks in its own snapshot, as the future uses them (shape (m,)).
        """
        for other, courses in self._active.items():
            where: slice | npt.NDArray[np.int64] = slice(None)
            theirs: Numbers = ids
            if other != snapshot:
                counterparts = self._counterparts.get((snapshot, other))
                if counterparts is None:
                    continue
                theirs = counterparts[ids]
                where = np.flatnonzero(theirs >= 0)
                theirs = theirs[where]
            for course in courses:
                yield course.future, where, theirs

    def consumed_since(self, mark: int) -> tuple[int, list[tuple[str, Ids]] | None]:
        """Return the next mark, and the blocks read since *mark*: a pair (snapshot, blocks) per progress, with block
        numbers of shape (n,), int32. None instead of the list where *mark* is too old."""
        if self._progress_count == mark:
            return mark, []
        remembered = list(self._consumed)
        end = remembered[-1][0] + 1 if remembered else mark
        if remembered and remembered[0][0] > mark:
            return end, None
        # The numbers are consecutive.
        new = remembered[max(0, mark - end + len(remembered)) :]
        return end, [(snapshot, ids) for _, snapshot, ids in new]

    # --- one consumer -------------------------------------------------------------------------------------------------

    def consumers(self) -> list[str]:
        """Return the names of consumers that are not suspended."""
        return [name for name, one in self._timelines.items() if not one.is_suspended]

    def has_consumer(self, consumer: str) -> bool:
        """Return whether anything is known of *consumer*."""
        return consumer in self._timelines

    def progress(self, consumer: str) -> tuple[int, int]:
        """Return (epoch, reads of it that are done). Raises KeyError."""
        course = self._timelines[consumer]
        return course.epoch_number, course.future.position

    def epoch(self, consumer: str, epoch: int) -> PlannedEpoch | None:
        """Return an epoch of *consumer* that is not over yet; None where it was not published."""
        course = self._timelines.get(consumer)
        return course.epochs.get(epoch) if course is not None else None

    def next_reads(self, consumer: str, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the next read of each of the blocks *ids* (shape (n,), int32), counted from the start of the current
        epoch, or UNKNOWN: shape (n,), int64. Raises KeyError."""
        return self._timelines[consumer].future.next_read[ids].astype(np.int64)

    def window(self, consumer: str, start: int, count: int) -> ReadWindow | None:
        """Return at most *count* reads of one epoch from read *start* on, or from the consumer's position if that is
        later; None where no more are known. *start* counts all reads since the consumer was first seen."""
        course = self._timelines.get(consumer)
        return course.window(start, count) if course is not None and not course.is_suspended else None

    def is_coming(self, consumer: str, reads: npt.NDArray[np.int64], blocks: Ids) -> npt.NDArray[np.bool_]:
        """Return which reads, numbered as in `window`, are still to come: shape (n,), bool. Of the reads beyond the
        position, the loader's workers have done some early. reads: shape (n,), int64; blocks: the block of each, shape
        (n,), int32. Raises KeyError."""
        return self._timelines[consumer].is_coming(reads, blocks)

    def generation(self, consumer: str) -> tuple[str, int]:
        """Return the consumer's snapshot, and a number that changes when it does anything but read on, which voids
        earlier read positions. Raises KeyError."""
        course = self._timelines[consumer]
        return course.space.snapshot, course.generation

    def _note_consumed(self, timeline: ConsumerTimeline, blocks: Ids) -> None:
        """Record that *blocks* were read."""
        if len(blocks):
            self._consumed.append((self._progress_count, timeline.space.snapshot, blocks.copy()))
            self._progress_count += 1

    def _update_active(self) -> None:
        active: dict[str, list[ConsumerTimeline]] = {}
        jobs: dict[str, dict[str, list[ConsumerTimeline]]] = {}
        for name, course in self._timelines.items():
            if not course.is_suspended and course.epochs:
                snapshot = course.space.snapshot
                active.setdefault(snapshot, []).append(course)
                jobs.setdefault(snapshot, {}).setdefault(job_of_consumer(name), []).append(course)
        self._active_jobs = jobs
        self._active = {snapshot: tuple(courses) for snapshot, courses in active.items()}
        self.version += 1
