"""Which orders are being worked on, what came of those that are done, and what is pushed in all."""

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.mount.push.held import Held
from cachefs.mount.push.workers import Task
from cachefs.push_messages import HeldPages, OrderDone

# A report takes the daemon 1 ms: finished orders wait so long for more, but not if none can come.
_BATCH_SECONDS: Final = 0.02
_BATCH: Final = 2


@dataclass(slots=True)
class _Open:
    """An order. parts: those still worked on; failed: indices so far."""

    whole: Task
    parts: int
    failed: list[int]


class Ledger:
    """Thread-safe. subscription: number of the one whose orders these are."""

    def __init__(self) -> None:
        self.subscription = 0
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        self._done: list[OrderDone] = []
        self._held = Held()

    def begin(self, whole: Task, parts: int) -> None:
        with self._changed:
            self._open[whole.serial] = _Open(whole, parts, [])

    def finish(self, part: Task, failed: list[int]) -> None:
        with self._changed:
            order = self._open[part.serial]
            order.parts -= 1
            order.failed += failed
            if not order.parts:
                del self._open[part.serial]
                self._close(order)
                self._changed.notify_all()

    def refuse(self, serial: int, blocks: int) -> None:
        """An order whose *blocks* all fail."""
        with self._changed:
            self._done.append(OrderDone(serial=serial, failed=np.arange(blocks, dtype="<u4").tobytes()))
            self._changed.notify_all()

    def take_done(self, seconds: float) -> tuple[int, list[OrderDone]]:
        """Subscription, and its orders done since the last call; waits up to *seconds* for the first."""
        with self._changed:
            if self._changed.wait_for(lambda: self._done, seconds):
                self._changed.wait_for(lambda: len(self._done) >= _BATCH or not self._open, _BATCH_SECONDS)
            done, self._done = self._done, []
            return self.subscription, done

    def settle(self) -> list[HeldPages]:
        """All that is pushed, for a new subscription, which numbers its orders anew.

        Waits for what is being worked on, and forgets what was not yet reported.
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
        whole = order.whole
        worked = np.ones(len(whole.entries), np.bool_)
        worked[order.failed] = False
        self._held.note(whole.place.snapshot.id, whole.entries[worked], whole.numbers[worked], dropped=whole.drop)
        failed = np.array(sorted(order.failed), "<u4").tobytes()
        self._done.append(OrderDone(serial=whole.serial, failed=failed))
