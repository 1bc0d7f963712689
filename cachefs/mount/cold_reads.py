"""Reads that wait for a disk: in threads, with a time limit.

A disk may hang for minutes, and a thread that reads from it cannot be ended. A read without an answer is therefore
abandoned together with its thread, and the block comes from the origin. The tier then counts as ailing: reads avoid it,
except for one read every RETEST_SECONDS that tests whether the tier answers again.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from cachefs.block import PIECE_SIZE, TIER_NAMES, BlockLocation
from cachefs.segment import SegmentReader

log = logging.getLogger(__name__)

# Most threads that read from the disk at once, abandoned threads included.
MAX_THREADS: Final = 32
# Most seconds that a read waits for the disk; less where the read's deadline is near. A disk that is merely busy
# answers the 32 reads of 1 MiB that can be ahead of a read in 0.3 s at 100 MB/s.
MAX_WAIT_SECONDS: Final = 5.0
RETEST_SECONDS: Final = 10.0
# Delay of the loop, in seconds, up to which the process counts as not having stood still.
_MAX_LOOP_DELAY: Final = 0.25


class TierUnresponsive(Exception):
    """The tier does not answer."""


class ColdReads:
    """Performs the reads of one worker that wait for a disk."""

    def __init__(self, directories: Mapping[int, Path], owner: int) -> None:
        """directories: tier number -> directory of its segments; owner: user id that must own the segments."""
        self.use_tiers(directories, owner)
        self._limiter = trio.CapacityLimiter(MAX_THREADS)
        # Tier number -> when to try an ailing tier again (time of trio's clock).
        self._unresponsive: dict[int, float] = {}
        self._answered_at: dict[int, float] = {}  # tier number -> time of its last answer (trio's clock)

    def use_tiers(self, directories: Mapping[int, Path], owner: int) -> None:
        """Read from these tiers from now on; the arguments are those of `__init__`."""
        self._directories = directories
        self._owner = owner

    async def read(
        self, key: bytes, location: BlockLocation, start: int, size: int, deadline: float
    ) -> memoryview | None:
        """Read as SegmentReader.read does, into a new buffer. deadline: of the whole read, by trio's clock.

        Raises TierUnresponsive where the tier does not answer within half of the remaining time.
        """
        tier, now = location.tier, trio.current_time()
        if self._unresponsive.get(tier, -math.inf) > now:
            raise TierUnresponsive
        if tier in self._unresponsive:  # this read tests the tier on behalf of all reads
            self._unresponsive[tier] = now + RETEST_SECONDS
        give_up = now + (deadline - now) / 2
        while True:
            asked = trio.current_time()
            patience = min(MAX_WAIT_SECONDS, give_up - asked)
            with trio.move_on_after(patience):
                data = await self._read_in_thread(key, location, start, size)
                self._answered_at[tier] = trio.current_time()
                if self._unresponsive.pop(tier, None) is not None:
                    log.info("the %s tier answers again", TIER_NAMES[tier])
                return data
            # A disk that answered other reads meanwhile is busy. After a stop of this process its state is unknown.
            stood_still = trio.current_time() - asked > patience + _MAX_LOOP_DELAY
            is_alive = stood_still or self._answered_at.get(tier, -math.inf) >= asked
            if not is_alive or trio.current_time() >= give_up:
                break
        if tier not in self._unresponsive:
            log.warning(
                "the %s tier (%s) has not answered a read for %.1f s; its blocks come from the origin until it does",
                TIER_NAMES[tier], self._directories.get(tier), patience,
            )  # fmt: skip
        self._unresponsive[tier] = trio.current_time() + RETEST_SECONDS
        raise TierUnresponsive

    async def _read_in_thread(self, key: bytes, location: BlockLocation, start: int, size: int) -> memoryview | None:
        directories, owner = self._directories, self._owner

        def copy() -> memoryview | None:
            segments = SegmentReader(directories, owner)
            try:
                return segments.read(key, location, start, size, memoryview(bytearray(size + 2 * PIECE_SIZE)))
            finally:
                segments.close()

        return await trio.to_thread.run_sync(copy, limiter=self._limiter, abandon_on_cancel=True)
