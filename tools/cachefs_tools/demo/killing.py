"""Kills the daemon in the middle of an epoch, and restarts it at once, like systemd would.

By then the tiers hold all blocks. Before that epoch the kernel's pages are dropped, so that its reads need the tiers.
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

# Number of the epoch, and the share of it after which the daemon is killed.
KILLED_IN: Final = EPOCHS - 1
KILLED_AT: Final = 0.5


class Killing:
    """Kills and restarts the daemon in steps, from calls before and during epochs."""

    def __init__(self, node: Node, stage: Stage, display: Display) -> None:
        self._node = node
        self._stage = stage
        self._display = display
        self._at: Position | None = None
        self._when = 0.0  # time of the kill
        self._before = self._after = -1  # blocks in the tiers
        self._requests = 0  # to the store until the kill
        self._away = 0.0

    def before(self, epoch: int) -> None:
        """Prepare an epoch."""
        if epoch == KILLED_IN:
            self._display.say("dropping the kernel's pages, so that reads need the tiers")
            mounted = Folder(str(self._node.mountpoint))
            forget_pages(mounted.path(name) for name in mounted.names)

    def during(self, job: Job) -> None:
        """Do the next step if it is due. Call repeatedly during an epoch."""
        position = job.position(KILLED_IN)
        if self._at is None and position.samples >= KILLED_AT * self._stage.settings.files:
            self._kill(position)
        elif self._at is not None and self._after < 0 and (self._node.socket.exists() or not self._node.runs):
            self._answers()

    def result(self, positions: Sequence[Position]) -> Kill:
        """Return the effect on the epoch with these positions. Raises CachefsError if the daemon does not come back."""
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
