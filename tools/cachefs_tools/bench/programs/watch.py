"""Looks at what is published while a program runs."""

import time

from cachefs.job_messages import JobView
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST, DaemonClient
from cachefs_tools.bench.programs.outcome import Published


class Watch:
    """Remembers which epochs of which consumers were ever known. The daemon forgets those that are over."""

    def __init__(self, client: DaemonClient) -> None:
        self._client = client
        self._known: dict[str, dict[int, float]] = {}
        self._problems: dict[str, None] = {}

    def look(self) -> None:
        """Ask the daemon. Raises CachefsError where it does not answer."""
        now = time.monotonic()
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

    def published(self) -> Published:
        """What was seen so far."""
        return Published(self._known, tuple(self._problems))
