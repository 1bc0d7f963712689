"""Records the commands in progress, the results of finished commands, and the blocks that were pushed and not dropped;
a daemon that has restarted asks for these.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from cachefs.mount.push.push_threads import PushTask
from cachefs.push_messages import PushResult, StoredPages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BlockNumbers: TypeAlias = "NDArray[np.uint32]"
EntryNumbers: TypeAlias = "NDArray[np.uint64]"
# A report takes the daemon 1 ms. Finished orders therefore wait this long for others, unless no other order is in
# progress, or _BATCH_COMMANDS of them have finished.
_BATCH_SECONDS: Final = 0.02
_BATCH_COMMANDS: Final = 2


class PushedBlocks:
    """The pushed blocks, by snapshot."""

    def __init__(self) -> None:
        # Snapshot id -> per entry number whether the file's first block is held, one byte each. Most files have no
        # other block.
        self._first: dict[str, NDArray[np.bool_]] = {}
        # Snapshot id -> (entry, number) of all other held blocks.
        self._later: dict[str, set[tuple[int, int]]] = {}

    def record_blocks(self, snapshot: str, entries: EntryNumbers, numbers: BlockNumbers, *, dropped: bool) -> None:
        """Record that blocks of *snapshot* were stored, or dropped.

        entries: shape (n,), uint64, entry numbers; numbers: shape (n,), uint32, of the blocks in their files.
        """
        if snapshot not in self._later:
            self._forget_empty()
        first = entries[numbers == 0]
        if len(first):
            self._first_block_flags(snapshot, int(first.max()))[first] = not dropped
        later = numbers != 0
        blocks = zip(entries[later].tolist(), numbers[later].tolist(), strict=True)
        known = self._later.setdefault(snapshot, set())
        if dropped:
            known.difference_update(blocks)
        else:
            known.update(blocks)

    def __iter__(self) -> Iterator[tuple[str, EntryNumbers, BlockNumbers]]:
        """Yield (snapshot, entries, numbers) for each snapshot with all its blocks, in arrays as `record_blocks` takes
        them."""
        if not self._later:
            return
        import numpy as np

        for snapshot in self._later:
            first = np.flatnonzero(self._first_block_flags(snapshot, 0)).astype("<u8")
            later = np.array(sorted(self._later[snapshot]), "<u8").reshape(-1, 2)
            entries = np.concatenate((first, later[:, 0]))
            if len(entries):
                numbers = np.concatenate((np.zeros(len(first), "<u4"), later[:, 1].astype("<u4")))
                yield snapshot, entries, numbers

    def _forget_empty(self) -> None:
        """Forget snapshots without held blocks, such as those before a refresh: each takes a byte per file. To be
        called when a snapshot is new, since it takes 0.1 ms per million files."""
        for snapshot in [
            name for name, later in self._later.items() if not later and not self._first_block_flags(name, 0).any()
        ]:
            del self._later[snapshot]
            self._first.pop(snapshot, None)

    def _first_block_flags(self, snapshot: str, max_entry: int) -> "NDArray[np.bool_]":
        """Return the flags of a snapshot's first blocks, with room for entries up to number *max_entry*."""
        import numpy as np

        bits = self._first.get(snapshot)
        if bits is None or len(bits) <= max_entry:
            grown = np.zeros(max(1024, 2 * (max_entry + 1)), np.bool_)
            if bits is not None:
                grown[: len(bits)] = bits
            bits = self._first[snapshot] = grown
        return bits


@dataclass(slots=True)
class _CommandInProgress:
    """An order in progress."""

    task: PushTask
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

    def begin_command(self, task: PushTask, parts: int) -> None:
        """Record that work on the order *task* begins, in *parts* parts."""
        with self._changed:
            self._in_progress[task.serial] = _CommandInProgress(task, parts, [])

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

        task = order.task
        worked = np.ones(len(task.entries), np.bool_)
        worked[order.failed] = False
        self._pushed_blocks.record_blocks(
            task.mounted.snapshot.id, task.entries[worked], task.numbers[worked], dropped=task.drop
        )
        failed = np.array(sorted(order.failed), "<u4").tobytes()
        self._finished.append(PushResult(serial=task.serial, failed=failed))
