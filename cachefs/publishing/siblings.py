"""The helpers of a job's other processes on this node, which are told what this one's process has learned.

Ranks read different samples of one dataset, so together they know all files after one epoch. A sibling may begin later
than we, or begin its consumer later. So for each sibling and consumer it is counted how much was told. A sibling that
has no such consumer yet hangs up, and is told from the start later.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.publishing.channel import SOCKET_NAME, Line, Op, Unheard
from cachefs.publishing.learned import LearnedFiles
from cachefs.publishing.published_consumer import Opening, PublishedConsumer

# Seconds between two looks for siblings.
LOOK_SECONDS: Final = 1.0
# Seconds, at most, until a sibling that has hung up is called again; the first time after LOOK_SECONDS.
MOST_SECONDS: Final = 16.0
# Rows of learned files (16 bytes) in a message, and so for each sibling and consumer in LOOK_SECONDS.
MOST_ROWS: Final = 1 << 16


@dataclass(slots=True)
class _Told:
    """What a sibling was told of one consumer."""

    # The consumer's files, of which it is told.
    learned: LearnedFiles
    line: Line | None = None
    rows: int = 0
    # When to speak again (monotonic seconds), and how long to wait the next time it hangs up or does not listen.
    next: float = 0.0
    patience: float = LOOK_SECONDS


class Siblings:
    """What the siblings of one helper were told."""

    def __init__(self, directory: Path) -> None:
        """directory: of this helper; those of its siblings lie beside it."""
        self._directory = directory
        self._told: dict[tuple[Path, int], _Told] = {}  # by directory and slot
        self._next_look = 0.0

    def tell(self, consumers: Iterable[PublishedConsumer], now: float) -> None:
        """Pass on what these consumers have learned of their own since the last time. Never waits."""
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
            # It is behind, and goes on from there; or it is gone, which shows the next time.
            self._wait(told, now)

    def _wait(self, told: _Told, now: float) -> None:
        told.next, told.patience = now + told.patience, min(2 * told.patience, MOST_SECONDS)

    def _hang_up(self, told: _Told) -> None:
        if told.line is not None:
            told.line.close()
        told.line, told.rows = None, 0
