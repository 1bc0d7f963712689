"""Records the orders in progress, the results of finished orders, and all pushed blocks."""

import threading
from dataclasses import dataclass
from typing import Final

from cachefs.mount.push.held import Held
from cachefs.mount.push.workers import Task
from cachefs.push_messages import HeldPages, OrderDone

# A report takes the daemon 1 ms. Finished orders therefore wait this long for others, unless no other order is in
# progress, or _BATCH of them have finished.
_BATCH_SECONDS: Final = 0.02
_BATCH: Final = 2


@dataclass(slots=True)
class _Open:
    """An order in progress."""

    whole: Task
    # Number of unfinished parts.
    parts: int
    # Indices of the blocks that have failed so far.
    failed: list[int]


class Ledger:
    """The orders of one subscription, and the pushed blocks. Thread-safe."""

    def __init__(self) -> None:
        self.subscription = 0  # number of the current subscription
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}  # by serial number
        self._done: list[OrderDone] = []  # not reported yet
        self._held = Held()

    def begin(self, whole: Task, parts: int) -> None:
        """Record that work on the order *whole* begins, in *parts* parts."""
        with self._changed:
            self._open[whole.serial] = _Open(whole, parts, [])

    def finish(self, part: Task, failed: list[int]) -> None:
        """Record that a part of an order is done. failed: indices, in the order, of the blocks that failed."""
        with self._changed:
            order = self._open[part.serial]
            order.parts -= 1
            order.failed += failed
            if not order.parts:
                del self._open[part.serial]
                self._close(order)
                self._changed.notify_all()

    def refuse(self, serial: int, blocks: int) -> None:
        """Report an order of *blocks* blocks as failed for all of them."""
        import numpy as np

        with self._changed:
            self._done.append(OrderDone(serial=serial, failed=np.arange(blocks, dtype="<u4").tobytes()))
            self._changed.notify_all()

    def take_done(self, seconds: float) -> tuple[int, list[OrderDone]]:
        """Return the subscription's number, and its orders that were finished since the last call.

        Waits up to *seconds* for the first order.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._done, seconds):
                self._changed.wait_for(lambda: len(self._done) >= _BATCH or not self._open, _BATCH_SECONDS)
            done, self._done = self._done, []
            return self.subscription, done

    def settle(self) -> list[HeldPages]:
        """Begin a new subscription, which numbers its orders anew; return all pushed blocks.

        Waits until no order is in progress. Finished orders that were not reported are forgotten.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
            self._done.clear()
            self.subscription += 1
            return [
                HeldPages(snapshot=snapshot, entries=entries.tobytes(), numbers=numbers.tobytes())
                for snapshot, entries, numbers in self._held
            ]

    def _close(self, order: _Open) -> None:
        import numpy as np

        whole = order.whole
        worked = np.ones(len(whole.entries), np.bool_)
        worked[order.failed] = False
        self._held.note(whole.place.snapshot.id, whole.entries[worked], whole.numbers[worked], dropped=whole.drop)
        failed = np.array(sorted(order.failed), "<u4").tobytes()
        self._done.append(OrderDone(serial=whole.serial, failed=failed))
