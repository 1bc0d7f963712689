"""A running training loop: its process, and its reports."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill

from cachefs.errors import CachefsError
from cachefs_bench.demo.results import LoopPosition, TrainedEpoch

START_SECONDS: Final = 60.0
_INTERVAL: Final = 0.05


@dataclass(slots=True)
class LoopReports:
    """The process's reports so far."""

    samples: int = -1  # number of samples found; -1: not ready
    positions: list[LoopPosition] = field(default_factory=list)
    epochs: list[TrainedEpoch] = field(default_factory=list)


class TrainingProcess:
    """A running training loop."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.reports = LoopReports()
        self._process = process
        self._log = log
        self._listener = threading.Thread(target=self._listen, name="demo-job", daemon=True)
        self._listener.start()

    def wait_ready(self, samples: int) -> None:
        """Wait until the loop has found its samples. Raises CachefsError if there are not *samples* of them."""
        self.wait_for(lambda: self.reports.samples >= 0, START_SECONDS)
        if self.reports.samples != samples:
            raise CachefsError(f"the training loop finds {self.reports.samples:,} samples, not {samples:,}")

    def begin_epoch(self) -> None:
        """Let the loop begin its next epoch."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `wait_for` reports why it has ended
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def position(self, epoch: int) -> LoopPosition:
        """Return the loop's position in its latest epoch."""
        positions = self.reports.positions
        return positions[-1] if positions and positions[-1].epoch == epoch else LoopPosition(epoch)

    def positions(self, epoch: int) -> list[LoopPosition]:
        """Return the positions after each batch of that epoch."""
        return [position for position in self.reports.positions if position.epoch == epoch]

    def wait_for(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition. Raises CachefsError if the loop fails or takes longer."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self._process.poll() is not None:
                self._listener.join(START_SECONDS)
                if reached():
                    return
                raise CachefsError(
                    f"the training loop ended with status {self._process.returncode}: {self._last_log_line()}"
                )
            if time.monotonic() > deadline:
                raise CachefsError(f"the training loop got no further within {seconds:.0f} s: {self._last_log_line()}")
            time.sleep(_INTERVAL)

    def stop(self) -> None:
        """End the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        wait_or_kill(self._process)
        self._listener.join(START_SECONDS)

    def _last_log_line(self) -> str:
        """Return the last line of its log: the error, if Python fails."""
        return (self._log.read_text(errors="replace").splitlines() or ["the log is empty"])[-1][:500]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "ready" in said:
                self.reports.samples = said["ready"]
            elif "at" in said:
                self.reports.positions.append(LoopPosition(**said["at"]))
            else:
                self.reports.epochs.append(TrainedEpoch(**said["epoch"]))


@contextmanager
def start_training(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[TrainingProcess]:
    """Run the command; it and its children are ended at the end. Its stderr goes to *log*."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*KILL_WITH_PARENT, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env,
            start_new_session=True,
        )  # fmt: skip
    try:
        job = TrainingProcess(process, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    try:
        yield job
    finally:
        job.stop()
