"""Looks at what is published, and at what the origin gives, while a program runs."""

import time
from collections.abc import Callable, Sequence

from cachefs.job_messages import JobView
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST, DaemonClient
from cachefs_tools.bench.programs.outcome import Epoch, Published


class Watch:
    """Remembers which epochs of which consumers were ever known. The daemon forgets those that are over."""

    def __init__(self, client: DaemonClient, origin_bytes: Callable[[], int]) -> None:
        self._client, self._origin_bytes = client, origin_bytes
        self._came: list[tuple[float, int]] = []  # bytes of the origin until then
        self._known: dict[str, dict[int, float]] = {}
        self._problems: dict[str, None] = {}

    def look(self) -> None:
        """Ask the daemon. Raises CachefsError where it does not answer."""
        came, now = self._origin_bytes(), time.monotonic()
        self._came.append((now, came))
        for view in self._client.call(JOB_LIST, Empty()).jobs:
            self.note(view, now)

    def note(self, view: JobView, now: float) -> None:
        """Remember what a view of a job says."""
        for consumer in view.consumers:
            known = self._known.setdefault(consumer.consumer, {})
            for epoch in consumer.known_epochs:
                known.setdefault(epoch, now)
            if consumer.problem:
                self._problems[consumer.problem] = None

    def first_bytes(self, epochs: Sequence[Epoch]) -> int:
        """Bytes that the origin gave in the first epoch until it had samples, from the first look in it to the last."""
        sizes = [size for seen, size in self._came if epochs and epochs[0].begin <= seen <= epochs[0].first]
        return sizes[-1] - sizes[0] if sizes else 0

    def published(self) -> Published:
        """What was seen so far."""
        return Published(self._known, tuple(self._problems))
