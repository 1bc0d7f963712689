"""Kills the daemon in the middle of an epoch, and restarts it at once, like systemd would.

By then the tiers hold all blocks. Before that epoch the kernel's pages are dropped, so that its reads need the tiers.
"""

import time
from collections.abc import Sequence
from typing import Final

from cachefs_tools.kernel_pages import drop_pages

from cachefs.errors import CachefsError
from cachefs_bench.demo.display import DemoDisplay
from cachefs_bench.demo.job import TrainingProcess
from cachefs_bench.demo.loaders import FolderSource
from cachefs_bench.demo.results import KillEffect, LoopPosition, longest_wait
from cachefs_bench.demo.settings import EPOCHS
from cachefs_bench.demo.stage import DemoStage
from cachefs_bench.lab.node import LabNode

# Number of the epoch, and the share of it after which the daemon is killed.
KILL_EPOCH: Final = EPOCHS - 1
KILL_SHARE: Final = 0.5


class DaemonKill:
    """Kills and restarts the daemon in steps, from calls before and during epochs."""

    def __init__(self, node: LabNode, stage: DemoStage, display: DemoDisplay) -> None:
        self._node = node
        self._stage = stage
        self._display = display
        self._position: LoopPosition | None = None
        self._killed_at = 0.0  # time of the kill
        self._blocks_before = self._blocks_after = -1  # blocks in the tiers
        self._requests_before = 0  # to the store until the kill
        self._downtime = 0.0

    def prepare_epoch(self, epoch: int) -> None:
        """Prepare an epoch."""
        if epoch == KILL_EPOCH:
            self._display.show_step("dropping the kernel's pages, so that reads need the tiers")
            mounted = FolderSource(str(self._node.mountpoint))
            drop_pages(mounted.sample_path(name) for name in mounted.names)

    def do_next_step(self, job: TrainingProcess) -> None:
        """Do the next step if it is due. Call repeatedly during an epoch."""
        position = job.position(KILL_EPOCH)
        if self._position is None and position.samples >= KILL_SHARE * self._stage.settings.files:
            self._kill(position)
        elif (
            self._position is not None
            and self._blocks_after < 0
            and (self._node.socket.exists() or not self._node.is_running)
        ):
            self._note_restart()

    def effect(self, positions: Sequence[LoopPosition]) -> KillEffect:
        """Return the effect on the epoch with these positions. Raises CachefsError if the daemon does not come back."""
        if self._position is None:
            raise CachefsError("the epoch was over before the daemon could be killed; use more files")
        if self._blocks_after < 0:
            self._note_restart()
        requests = self._stage.store.read_counters().requests - self._requests_before
        return KillEffect(
            self._position,
            self._downtime,
            self._blocks_before,
            self._blocks_after,
            requests,
            longest_wait(positions, self._position),
        )

    def _kill(self, position: LoopPosition) -> None:
        self._blocks_before, self._requests_before = self._count_blocks(), self._stage.store.read_counters().requests
        pid = self._node.pid
        self._position, self._killed_at = position, time.monotonic()
        self._node.kill_daemon()
        self._node.start_daemon(self._stage.node_settings())
        self._display.show_step(
            f"cachefsd, process {pid}, gets SIGKILL at sample {position.samples:,}; another one starts"
        )

    def _note_restart(self) -> None:
        self._node.wait_ready()
        self._downtime = time.monotonic() - self._killed_at
        self._blocks_after = self._count_blocks()
        self._display.show_step(
            f"process {self._node.pid} answers after {self._downtime:.1f} s, with {self._blocks_after:,} blocks"
        )

    def _count_blocks(self) -> int:
        return sum(tier.blocks for tier in self._node.status().tiers)
