"""The threads of a pusher, and the distribution of an order's blocks among them.

A block always goes to the same thread, which works in the order of its queue. A drop of a block after its store is
therefore executed after the store, and blocks are processed roughly in the order of their deadlines.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from cachefs.mount.push.blocks import BlockMover, StoreUnsupported, TierSource
from cachefs.mount.push.mounted_snapshots import MountedSnapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Seconds between closes of segments that the daemon has deleted; until closed, they take space.
_FORGET_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class PushTask:
    """An order, or a part of one: blocks of one snapshot, in processing order."""

    # Serial number of the order.
    serial: int
    mounted: MountedSnapshot
    # True to drop the blocks' pages instead of storing them.
    drop: bool
    # Index of each block in the order: shape (n,).
    indices: "NDArray[np.intp]"
    # Entry number of each block's file: shape (n,).
    entries: "NDArray[np.uint64]"
    # Number of each block in its file: shape (n,).
    numbers: "NDArray[np.uint32]"
    # True to store only blocks that lack pages in the kernel.
    check: bool = False


def split_task(task: PushTask, threads: int) -> dict[int, PushTask]:
    """Return thread number -> its part of the order, without threads that have none."""
    import numpy as np

    thread_of = (task.entries + task.numbers) % np.uint64(threads)
    parts = {}
    for thread in range(threads):
        mine = np.flatnonzero(thread_of == thread)
        if len(mine):
            entries, numbers = task.entries[mine], task.numbers[mine]
            parts[thread] = PushTask(
                task.serial, task.mounted, task.drop, task.indices[mine], entries, numbers, task.check
            )
    return parts


class PushThreads:
    """The threads, one for each BlockMover."""

    def __init__(
        self,
        movers: Sequence[BlockMover],
        on_finished: Callable[[PushTask, list[int]], None],
        on_unsupported: Callable[[StoreUnsupported], None],
        can_store: Callable[[], bool],
    ) -> None:
        """on_finished: called by a thread with each finished task, and the indices of its failed blocks;
        on_unsupported: called by a thread for each block that the kernel does not take; can_store: returns whether
        pages are stored at all."""
        self._done = on_finished
        self._impossible = on_unsupported
        self._stores = can_store
        self._queues: list[SimpleQueue[PushTask | TierSource]] = [SimpleQueue() for _ in movers]
        for number, (mover, queue) in enumerate(zip(movers, self._queues, strict=True)):
            threading.Thread(target=self._run_thread, args=(mover, queue), name=f"push-{number}", daemon=True).start()

    def use_source(self, source: TierSource) -> None:
        """Read the blocks of all tasks submitted from now on from *source*."""
        for queue in self._queues:
            queue.put(source)

    def submit_tasks(self, parts: dict[int, PushTask]) -> None:
        for thread, task in parts.items():
            self._queues[thread].put(task)

    def _run_thread(self, mover: BlockMover, queue: "SimpleQueue[PushTask | TierSource]") -> None:
        forget_at = 0.0
        while True:
            if time.monotonic() >= forget_at:
                mover.forget_unlinked()
                forget_at = time.monotonic() + _FORGET_SECONDS
            try:
                task = queue.get(timeout=_FORGET_SECONDS)
            except Empty:
                continue
            if isinstance(task, TierSource):
                mover.use_source(task)
                continue
            self._done(task, self._execute_task(mover, task))

    def _execute_task(self, mover: BlockMover, task: PushTask) -> list[int]:
        """Execute *task*. Returns the indices of the blocks that failed."""
        failed = []
        for index, entry, number in zip(
            task.indices.tolist(), task.entries.tolist(), task.numbers.tolist(), strict=True
        ):
            try:
                done = mover.move_block(
                    task.mounted, entry, number, drop=task.drop, check=task.check, stores=self._stores()
                )
            except StoreUnsupported as error:
                self._impossible(error)
                done = False
            if not done:
                failed.append(index)
        return failed
