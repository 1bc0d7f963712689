"""Polls published sequences and the origin's counters while a program runs."""

import time
from collections.abc import Callable, Sequence

from cachefs.job_messages import JobView
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST, DaemonClient
from cachefs_bench.programs.outcome import ProgramEpoch, PublishedSequences


class SequenceWatch:
    """Records which epochs of which consumers were ever known. The daemon forgets past epochs."""

    def __init__(self, client: DaemonClient, origin_bytes: Callable[[], int]) -> None:
        self._client, self._origin_bytes = client, origin_bytes
        self._origin_samples: list[tuple[float, int]] = []  # time and bytes from the origin until then
        self._known: dict[str, dict[int, float]] = {}
        self._problems: dict[str, None] = {}

    def poll_daemon(self) -> None:
        """Query the daemon. Raises CachefsError if it does not answer."""
        came, now = self._origin_bytes(), time.monotonic()
        self._origin_samples.append((now, came))
        for view in self._client.call(JOB_LIST, Empty()).jobs:
            self.record_view(view, now)

    def record_view(self, view: JobView, now: float) -> None:
        """Record a view of a job."""
        for consumer in view.consumers:
            known = self._known.setdefault(consumer.consumer, {})
            for epoch in consumer.known_epochs:
                known.setdefault(epoch, now)
            if consumer.problem:
                self._problems[consumer.problem] = None

    def first_bytes(self, epochs: Sequence[ProgramEpoch]) -> int:
        """Return the bytes from the origin in the first epoch until its first samples, between the first and the last
        query in that time."""
        sizes = [size for seen, size in self._origin_samples if epochs and epochs[0].begin <= seen <= epochs[0].first]
        return sizes[-1] - sizes[0] if sizes else 0

    def published(self) -> PublishedSequences:
        """Return the records so far."""
        return PublishedSequences(self._known, tuple(self._problems))
