"""Sends learned files to the helpers of the job's other processes on this node (siblings).

Ranks read different samples of one dataset, so together they know all files after one epoch. A sibling may begin later,
or begin its consumer later, so the rows sent are counted for each sibling and consumer. A sibling without the consumer
hangs up, and is later sent everything from the start.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.publishing.channel import SOCKET_NAME, Line, Op, Unheard
from cachefs.publishing.learned import LearnedFiles
from cachefs.publishing.published_consumer import Opening, PublishedConsumer

# Seconds between two searches for siblings.
LOOK_SECONDS: Final = 1.0
# Maximum seconds before reconnecting to a sibling that has hung up; the first time after LOOK_SECONDS.
MOST_SECONDS: Final = 16.0
# Maximum number of rows of learned files (16 bytes) in a message, and so per sibling and consumer in LOOK_SECONDS.
MOST_ROWS: Final = 1 << 16


@dataclass(slots=True)
class _Told:
    """The rows of one consumer that were sent to a sibling."""

    # The consumer's learned files.
    learned: LearnedFiles
    line: Line | None = None
    rows: int = 0
    # When to send again (monotonic seconds), and the pause after the next time that the sibling hangs up or is busy.
    next: float = 0.0
    patience: float = LOOK_SECONDS


class Siblings:
    """Sends what one helper's consumers have learned to its siblings."""

    def __init__(self, directory: Path) -> None:
        """directory: of this helper, beside those of its siblings."""
        self._directory = directory
        self._told: dict[tuple[Path, int], _Told] = {}  # by directory and slot
        self._next_look = 0.0

    def tell(self, consumers: Iterable[PublishedConsumer], now: float) -> None:
        """Send what these consumers have learned themselves since the last call. Never waits."""
        learning = {consumer.opening.slot: consumer for consumer in consumers if consumer.learned.own_rows}
        if now < self._next_look or not (learning or self._told):
            return
        self._next_look = now + LOOK_SECONDS
        there = {path.parent for path in self._directory.parent.glob(f"*/{SOCKET_NAME}")} - {self._directory}
        for (directory, slot), told in list(self._told.items()):
            if directory not in there or slot not in learning or learning[slot].learned is not told.learned:
                self._hang_up(self._told.pop((directory, slot)))
        for directory in there:
            for slot, consumer in learning.items():
                told = self._told.setdefault((directory, slot), _Told(consumer.learned))
                if now >= told.next:
                    self._tell(directory, consumer.opening, told, now)

    def _tell(self, directory: Path, opening: Opening, told: _Told, now: float) -> None:
        if told.line is not None and told.line.was_hung_up:
            self._hang_up(told)
            self._wait(told, now)
            return
        if told.line is not None:
            told.patience = LOOK_SECONDS
        if told.rows >= told.learned.own_rows:
            return
        rows, mounts = told.learned.rows(told.rows, MOST_ROWS)
        message = {
            "op": Op.LEARNED,
            "slot": opening.slot,
            "length": opening.length,
            "mounts": [(str(mount.path), mount.device, mount.source) for mount in mounts],
        }
        try:
            told.line = told.line or Line(directory)
            told.line.send(message, rows, wait=False)
            told.rows += len(rows)
        except (OSError, Unheard):
            # The sibling is behind, and gets the same rows later; or it is gone, which the next call notices.
            self._wait(told, now)

    def _wait(self, told: _Told, now: float) -> None:
        told.next, told.patience = now + told.patience, min(2 * told.patience, MOST_SECONDS)

    def _hang_up(self, told: _Told) -> None:
        if told.line is not None:
            told.line.close()
        told.line, told.rows = None, 0
