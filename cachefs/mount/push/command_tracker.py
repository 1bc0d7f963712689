"""Records the orders in progress, the results of finished orders, and all pushed blocks."""

import threading
from dataclasses import dataclass
from typing import Final

from cachefs.mount.push.push_threads import PushTask
from cachefs.mount.push.pushed_blocks import PushedBlocks
from cachefs.push_messages import PushResult, StoredPages

# A report takes the daemon 1 ms. Finished orders therefore wait this long for others, unless no other order is in
# progress, or _BATCH_COMMANDS of them have finished.
_BATCH_SECONDS: Final = 0.02
_BATCH_COMMANDS: Final = 2


@dataclass(slots=True)
class _CommandInProgress:
    """An order in progress."""

    whole: PushTask
    # Number of unfinished parts.
    parts: int
    # Indices of the blocks that have failed so far.
    failed: list[int]


class CommandTracker:
    """The orders of one subscription, and the pushed blocks. Thread-safe."""

    def __init__(self) -> None:
        self.subscription = 0  # number of the current subscription
        self._changed = threading.Condition()
        self._in_progress: dict[int, _CommandInProgress] = {}  # by serial number
        self._finished: list[PushResult] = []  # not reported yet
        self._pushed_blocks = PushedBlocks()

    def begin_command(self, whole: PushTask, parts: int) -> None:
        """Record that work on the order *whole* begins, in *parts* parts."""
        with self._changed:
            self._in_progress[whole.serial] = _CommandInProgress(whole, parts, [])

    def finish_part(self, part: PushTask, failed: list[int]) -> None:
        """Record that a part of an order is done. failed: indices, in the order, of the blocks that failed."""
        with self._changed:
            order = self._in_progress[part.serial]
            order.parts -= 1
            order.failed += failed
            if not order.parts:
                del self._in_progress[part.serial]
                self._complete_command(order)
                self._changed.notify_all()

    def refuse_command(self, serial: int, blocks: int) -> None:
        """Report an order of *blocks* blocks as failed for all of them."""
        import numpy as np

        with self._changed:
            self._finished.append(PushResult(serial=serial, failed=np.arange(blocks, dtype="<u4").tobytes()))
            self._changed.notify_all()

    def take_finished(self, seconds: float) -> tuple[int, list[PushResult]]:
        """Return the subscription's number, and its orders that were finished since the last call.

        Waits up to *seconds* for the first order.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._finished, seconds):
                self._changed.wait_for(
                    lambda: len(self._finished) >= _BATCH_COMMANDS or not self._in_progress, _BATCH_SECONDS
                )
            done, self._finished = self._finished, []
            return self.subscription, done

    def begin_subscription(self) -> list[StoredPages]:
        """Begin a new subscription, which numbers its orders anew; return all pushed blocks.

        Waits until no order is in progress. Finished orders that were not reported are forgotten.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._in_progress)
            self._finished.clear()
            self.subscription += 1
            return [
                StoredPages(snapshot=snapshot, entries=entries.tobytes(), numbers=numbers.tobytes())
                for snapshot, entries, numbers in self._pushed_blocks
            ]

    def _complete_command(self, order: _CommandInProgress) -> None:
        import numpy as np

        whole = order.whole
        worked = np.ones(len(whole.entries), np.bool_)
        worked[order.failed] = False
        self._pushed_blocks.record_blocks(
            whole.mounted.snapshot.id, whole.entries[worked], whole.numbers[worked], dropped=whole.drop
        )
        failed = np.array(sorted(order.failed), "<u4").tobytes()
        self._finished.append(PushResult(serial=whole.serial, failed=failed))
