"""Sends learned files to the helpers of the job's other processes on this node (siblings).

Ranks read different samples of one dataset, so together they know all files after one epoch. A sibling may begin later,
or begin its consumer later, so the rows sent are counted for each sibling and consumer. A sibling without the consumer
hangs up, and is later sent everything from the start.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachefs.backoff import Backoff
from cachefs.publishing.channel import SOCKET_NAME, HelperConnection, HelperUnreachable, MessageKind
from cachefs.publishing.files.learned import LearnedFiles
from cachefs.publishing.published_consumer import ConsumerOpening, PublishedConsumer

# Seconds between two searches for siblings.
SEARCH_SECONDS: Final = 1.0
# Maximum seconds before reconnecting to a sibling that has hung up; the first time after SEARCH_SECONDS.
MAX_PAUSE_SECONDS: Final = 16.0
# Maximum number of rows of learned files (16 bytes) in a message, and so per sibling and consumer in SEARCH_SECONDS.
MAX_ROWS: Final = 1 << 16


@dataclass(slots=True)
class _SentRows:
    """The rows of one consumer that were sent to a sibling."""

    # The consumer's learned files.
    learned: LearnedFiles
    connection: HelperConnection | None = None
    rows: int = 0
    # Until when nothing is sent (monotonic seconds), after the sibling has hung up or was busy.
    backoff: Backoff = field(default_factory=lambda: Backoff(SEARCH_SECONDS, MAX_PAUSE_SECONDS))


class SiblingHelpers:
    """Sends what one helper's consumers have learned to its siblings."""

    def __init__(self, directory: Path) -> None:
        """directory: of this helper, beside those of its siblings."""
        self._directory = directory
        self._sent: dict[tuple[Path, int], _SentRows] = {}  # by directory and slot
        self._search_at = 0.0

    def send_learned(self, consumers: Iterable[PublishedConsumer], now: float) -> None:
        """Send what these consumers have learned themselves since the last call. Never waits."""
        learning = {consumer.opening.slot: consumer for consumer in consumers if consumer.learned.own_row_count}
        if now < self._search_at or not (learning or self._sent):
            return
        self._search_at = now + SEARCH_SECONDS
        there = {path.parent for path in self._directory.parent.glob(f"*/{SOCKET_NAME}")} - {self._directory}
        for (directory, slot), sent in list(self._sent.items()):
            if directory not in there or slot not in learning or learning[slot].learned is not sent.learned:
                self._disconnect(self._sent.pop((directory, slot)))
        for directory in there:
            for slot, consumer in learning.items():
                sent = self._sent.setdefault((directory, slot), _SentRows(consumer.learned))
                if sent.backoff.is_due(now):
                    self._send_rows(directory, consumer.opening, sent, now)

    def _send_rows(self, directory: Path, opening: ConsumerOpening, sent: _SentRows, now: float) -> None:
        if sent.connection is not None and sent.connection.is_disconnected:
            self._disconnect(sent)
            self._postpone(sent, now)
            return
        if sent.connection is not None:
            sent.backoff.reset()
        if sent.rows >= sent.learned.own_row_count:
            return
        rows, mounts = sent.learned.read_rows(sent.rows, MAX_ROWS)
        message = {
            "op": MessageKind.LEARNED,
            "slot": opening.slot,
            "length": opening.length,
            "mounts": [(str(mount.path), mount.device, mount.source) for mount in mounts],
        }
        try:
            sent.connection = sent.connection or HelperConnection(directory)
            sent.connection.send(message, rows, wait=False)
            sent.rows += len(rows)
        except (OSError, HelperUnreachable):
            # The sibling is behind, and gets the same rows later; or it is gone, which the next call notices.
            self._postpone(sent, now)

    def _postpone(self, sent: _SentRows, now: float) -> None:
        sent.backoff.note_failure(now)

    def _disconnect(self, sent: _SentRows) -> None:
        if sent.connection is not None:
            sent.connection.close()
        sent.connection, sent.rows = None, 0
