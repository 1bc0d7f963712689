"""The threads of a pusher, and how an order is shared out among them.

A block always goes to the same thread, whose queue is in order: so a drop that follows the store of a block is done
after it, and blocks are worked on roughly in the order of their deadlines.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachefs.mount.push.blocks import BlockMover, Source
from cachefs.mount.push.pages import NotPossible
from cachefs.mount.push.places import Place

# A segment that the daemon has deleted takes space until we close it.
_FORGET_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Task:
    """Blocks to store, to drop, or to store where pages lack, in this order. serial: of the order they are a part of;
    indices: where in it."""

    serial: int
    place: Place
    drop: bool
    indices: NDArray[np.intp]
    entries: NDArray[np.uint64]
    numbers: NDArray[np.uint32]
    check: bool = False


def share_out(whole: Task, threads: int) -> dict[int, Task]:
    """Thread -> its part; threads without one are left out."""
    thread_of = (whole.entries + whole.numbers) % np.uint64(threads)
    parts = {}
    for thread in range(threads):
        mine = np.flatnonzero(thread_of == thread)
        if len(mine):
            entries, numbers = whole.entries[mine], whole.numbers[mine]
            parts[thread] = Task(
                whole.serial, whole.place, whole.drop, whole.indices[mine], entries, numbers, whole.check
            )
    return parts


class Workers:
    """done: called by a thread with each task and those of its indices that failed; impossible: called by each thread
    that finds that this kernel takes no pages, and does no more."""

    def __init__(
        self,
        movers: Sequence[BlockMover],
        done: Callable[[Task, list[int]], None],
        impossible: Callable[[NotPossible], None],
    ) -> None:
        self._done = done
        self._impossible = impossible
        self._queues: list[SimpleQueue[Task | Source]] = [SimpleQueue() for _ in movers]
        for number, (mover, queue) in enumerate(zip(movers, self._queues, strict=True)):
            threading.Thread(target=self._work, args=(mover, queue), name=f"push-{number}", daemon=True).start()

    def use(self, source: Source) -> None:
        """For the tasks that are submitted from now on."""
        for queue in self._queues:
            queue.put(source)

    def submit(self, parts: dict[int, Task]) -> None:
        for thread, task in parts.items():
            self._queues[thread].put(task)

    def _work(self, mover: BlockMover, queue: "SimpleQueue[Task | Source]") -> None:
        forget_at = 0.0
        while True:
            if time.monotonic() >= forget_at:
                mover.forget_unlinked()
                forget_at = time.monotonic() + _FORGET_SECONDS
            try:
                task = queue.get(timeout=_FORGET_SECONDS)
            except Empty:
                continue
            if isinstance(task, Source):
                mover.use(task)
                continue
            try:
                failed = _carry_out(mover, task)
            except NotPossible as error:
                self._impossible(error)
                return
            self._done(task, failed)


def _carry_out(mover: BlockMover, task: Task) -> list[int]:
    blocks = zip(task.indices.tolist(), task.entries.tolist(), task.numbers.tolist(), strict=True)
    how = {"drop": task.drop, "check": task.check}
    return [index for index, entry, number in blocks if not mover.move(task.place, entry, number, **how)]
