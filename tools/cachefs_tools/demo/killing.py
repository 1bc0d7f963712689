"""The daemon is killed in the middle of an epoch, and started again at once, as systemd would do it.

By then the tiers have all blocks. Before that epoch the kernel's pages are dropped, so that its reads need the tiers.
"""

import time
from collections.abc import Sequence
from typing import Final

from cachefs.errors import CachefsError
from cachefs_tools.demo.display import Display
from cachefs_tools.demo.figures import Kill, Position, slowest_wait
from cachefs_tools.demo.job import Job
from cachefs_tools.demo.loaders import Folder
from cachefs_tools.demo.settings import EPOCHS
from cachefs_tools.demo.stage import Stage
from cachefs_tools.kernel_pages import forget_pages
from cachefs_tools.lab.node import Node

# The number of the epoch, and the part of it after which it happens.
KILLED_IN: Final = EPOCHS - 1
KILLED_AT: Final = 0.5


class Killing:
    """Called before each epoch and again and again during it, and does the next step when its time has come."""

    def __init__(self, node: Node, stage: Stage, display: Display) -> None:
        self._node = node
        self._stage = stage
        self._display = display
        self._at: Position | None = None
        self._when = 0.0  # of the kill
        self._before = self._after = -1  # blocks in the tiers
        self._requests = 0  # that had come to the store
        self._away = 0.0

    def before(self, epoch: int) -> None:
        """Called before an epoch begins."""
        if epoch == KILLED_IN:
            self._display.say("dropping the kernel's pages, so that reads need the tiers")
            mounted = Folder(str(self._node.mountpoint))
            forget_pages(mounted.path(name) for name in mounted.names)

    def during(self, job: Job) -> None:
        """Called again and again while an epoch is read."""
        position = job.position(KILLED_IN)
        if self._at is None and position.samples >= KILLED_AT * self._stage.settings.files:
            self._kill(position)
        elif self._at is not None and self._after < 0 and (self._node.socket.exists() or not self._node.runs):
            self._answers()

    def result(self, positions: Sequence[Position]) -> Kill:
        """What it did to the epoch with these positions. Raises CachefsError where the daemon does not come back."""
        if self._at is None:
            raise CachefsError("the epoch was over before the daemon could be killed; use more files")
        if self._after < 0:
            self._answers()
        requests = self._stage.store.counters().requests - self._requests
        return Kill(self._at, self._away, self._before, self._after, requests, slowest_wait(positions, self._at))

    def _kill(self, position: Position) -> None:
        self._before, self._requests = self._held(), self._stage.store.counters().requests
        pid = self._node.pid
        self._at, self._when = position, time.monotonic()
        self._node.kill_daemon()
        self._node.spawn(self._stage.node_settings())
        self._display.say(f"cachefsd, process {pid}, gets SIGKILL at sample {position.samples:,}; another one starts")

    def _answers(self) -> None:
        self._node.ready()
        self._away = time.monotonic() - self._when
        self._after = self._held()
        self._display.say(f"process {self._node.pid} answers after {self._away:.1f} s, with {self._after:,} blocks")

    def _held(self) -> int:
        return sum(tier.blocks for tier in self._node.status().tiers)
