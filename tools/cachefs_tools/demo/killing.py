"""The daemon is killed in the middle of the first epoch, and started again at once, as systemd would do it."""

import time
from collections.abc import Sequence
from typing import Final

from cachefs.errors import CachefsError
from cachefs_tools.demo.display import Display
from cachefs_tools.demo.figures import Kill, Position, slowest_wait
from cachefs_tools.demo.job import Job
from cachefs_tools.lab.node import Node
from cachefs_tools.scratch_config import NodeSettings

# The part of the epoch after which it happens.
KILLED_AT: Final = 0.5


class Killing:
    """Called again and again during a run, and does the next step when its time has come."""

    def __init__(self, node: Node, settings: NodeSettings, files: int, display: Display) -> None:
        self._node = node
        self._display = display
        self._settings = settings
        self._due = KILLED_AT * files  # samples
        self._at: Position | None = None
        self._when = 0.0  # of the kill
        self._before = self._after = -1  # blocks in the tiers
        self._away = 0.0

    def __call__(self, job: Job) -> None:
        position = job.position(0)
        if self._at is None and position.samples >= self._due:
            self._kill(position)
        elif self._at is not None and self._after < 0 and (self._node.socket.exists() or not self._node.runs):
            self._answers()

    def result(self, positions: Sequence[Position]) -> Kill:
        """What it did to the epoch with these positions. Raises CachefsError where the daemon does not come back."""
        if self._at is None:
            raise CachefsError("the epoch was over before the daemon could be killed; use more files")
        if self._after < 0:
            self._answers()
        return Kill(self._at, self._away, self._before, self._after, slowest_wait(positions, self._at))

    def _kill(self, position: Position) -> None:
        self._before = self._held()
        pid = self._node.pid
        self._at, self._when = position, time.monotonic()
        self._node.kill_daemon()
        self._node.spawn(self._settings)
        self._display.say(f"cachefsd, process {pid}, gets SIGKILL at sample {position.samples:,}; another one starts")

    def _answers(self) -> None:
        self._node.ready()
        self._away = time.monotonic() - self._when
        self._after = self._held()
        self._display.say(f"process {self._node.pid} answers after {self._away:.1f} s, with {self._after:,} blocks")

    def _held(self) -> int:
        return sum(tier.blocks for tier in self._node.status().tiers)
