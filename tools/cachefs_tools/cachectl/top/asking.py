"""Asks the daemon for pictures, in a thread: nobody who looks at them waits for the daemon.

What a picture costs is bounded. The list of datasets is asked for only when it may have changed, and what is cached of
a few datasets at a time only. Where answers take long, the next picture is asked for later.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.errors import CachefsError
from cachefs.messages import DatasetCached, DatasetNames, DatasetView, Empty
from cachefs.rpc import DATASET_CACHED, DATASET_LIST, JOB_LIST, STATUS, DaemonClient
from cachefs_tools.cachectl.top.picture import Picture

# Seconds that the daemon has for each answer.
PATIENCE: Final = 5.0
# Of the time, the part in which the daemon is asked at most; and seconds after which it is asked all the same.
_BUSY: Final = 0.2
_MOST_PAUSE: Final = 10.0
# Pictures after which the list of datasets is asked for again, though their number is the same.
_LIST_EVERY: Final = 10
# Datasets of which one picture asks what is cached: of those that are looked at, and of the others. Each takes the
# daemon 5 ms.
_SHOWN_AT_ONCE: Final = 4
_OTHERS_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """How the last attempt to get a picture has ended."""

    number: int  # of the attempt
    picture: Picture | None  # the last one; None: there was none yet
    problem: str  # why there is none since; empty where there is


class Asker:
    """Asks again and again, once `start` was called."""

    def __init__(self, client: DaemonClient, interval: float) -> None:
        """interval: seconds from picture to picture."""
        self.answer = Answer(0, None, "")
        # Names of the datasets that somebody looks at now.
        self.looked_at: Callable[[], Sequence[str]] = list
        self._client = client
        self.interval = interval
        self._datasets: list[DatasetView] = []
        self._cached: dict[str, DatasetCached] = {}
        self._number = 0  # of pictures so far
        self._asked: dict[str, int] = {}  # by dataset: the number of the picture for which its cache was asked for last
        self._instance = ""
        self._stopped = threading.Event()

    def begin(self) -> Picture:
        """The first picture. Raises CachefsError."""
        picture = self.ask()
        self.answer = Answer(1, picture, "")
        return picture

    def ask(self) -> Picture:
        """A picture. Raises CachefsError."""
        status = self._client.call(STATUS, Empty(), PATIENCE)
        jobs = self._client.call(JOB_LIST, Empty(), PATIENCE)
        known = status.instance == self._instance and status.datasets == len(self._datasets)
        if self._number % _LIST_EVERY == 0 or not known:
            self._datasets = self._client.call(DATASET_LIST, Empty(), PATIENCE).datasets
        self._instance = status.instance
        self._ask_cached()
        self._number += 1
        return Picture(time.monotonic(), time.time(), status, jobs, self._datasets, dict(self._cached))

    def _ask_cached(self) -> None:
        """What is cached of some datasets: mostly of those that somebody looks at, and of the others in turn."""
        there = [view.name for view in self._datasets]
        names = self._next_names(there)
        try:
            found = self._client.call(DATASET_CACHED, DatasetNames(names=names), PATIENCE).datasets if names else []
        except CachefsError:  # a daemon of an earlier version does not know this call
            found = []
        self._cached.update((one.name, one) for one in found)
        for gone in self._cached.keys() - set(there):
            del self._cached[gone]

    def _next_names(self, there: list[str]) -> list[str]:
        """Those that somebody looks at, and some others: of each, those that were asked for longest ago."""
        looked_at = set(self.looked_at())
        oldest = sorted(there, key=lambda name: self._asked.get(name, -1))
        shown = [name for name in oldest if name in looked_at][:_SHOWN_AT_ONCE]
        others = [name for name in oldest if name not in looked_at][:_OTHERS_AT_ONCE]
        self._asked = {name: self._asked.get(name, -1) for name in there}
        self._asked.update(dict.fromkeys([*shown, *others], self._number))
        return [*shown, *others]

    def start(self) -> None:
        """Go on until `stop` is called, or the process ends."""
        threading.Thread(target=self._run, name="asker", daemon=True).start()

    def stop(self) -> None:
        """Ask for nothing more. An answer that is under way is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun, last = time.monotonic(), self.answer
            try:
                self.answer = Answer(last.number + 1, self.ask(), "")
                took = time.monotonic() - begun
                pause = max(self.interval - took, min(took * (1 / _BUSY - 1), _MOST_PAUSE))
            except CachefsError as error:
                self.answer = Answer(last.number + 1, last.picture, str(error))
                pause = self.interval
            self._stopped.wait(pause)
