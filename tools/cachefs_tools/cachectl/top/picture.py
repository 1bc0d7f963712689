"""The state of the daemon at one moment, and the thread that queries it, so that the screen never waits.

The cost of a picture is bounded: the list of datasets is requested only if it may have changed, and cached bytes for a
few datasets at a time. If answers take long, the next picture is requested later.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.job_messages import JobList
from cachefs.messages import CachedDataset, DatasetNames, DatasetView, Empty, Status
from cachefs.rpc import DATASET_CACHED, DATASET_LIST, JOB_LIST, STATUS, DaemonClient
from cachefs_tools.cachectl.job_page import job_document

# Deadline in seconds of each query.
CALL_SECONDS: Final = 5.0
# Largest share of time spent in queries; and longest pause in seconds.
_MAX_TIME_SHARE: Final = 0.2
_MAX_PAUSE: Final = 10.0
# Pictures after which the list of datasets is requested again although their number is unchanged.
_LIST_INTERVAL: Final = 10
# Datasets per picture whose cached bytes are requested: visible ones, and others. Each takes the daemon 5 ms.
_VISIBLE_PER_PICTURE: Final = 4
_OTHERS_PER_PICTURE: Final = 2


@dataclass(frozen=True, slots=True)
class Picture:
    """The node's state at one moment."""

    when: float  # monotonic seconds
    unix_time: float  # unix seconds
    status: Status
    jobs: JobList
    datasets: list[DatasetView]
    cached: Mapping[str, CachedDataset]  # by dataset: those requested so far


def picture_document(picture: Picture, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return the document of `top --json`. rates: bytes per second by flow."""
    datasets = []
    for one in picture.datasets:
        known = picture.cached.get(one.name)
        here = {"memory": known.memory, "ssd": known.ssd} if known is not None else {"memory": None, "ssd": None}
        datasets.append({**msgspec.structs.asdict(one), **here})
    return {
        "when": picture.unix_time, "status": picture.status, "rates": dict(rates),
        "jobs": [job_document(view) for view in picture.jobs.jobs],
        "guessed": picture.jobs.guessed, "datasets": datasets,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PictureResult:
    """The result of the last attempt to get a picture."""

    number: int  # of the attempt
    picture: Picture | None  # the last one; None: none yet
    problem: str  # why the last attempt failed; empty if it did not


class PictureSource:
    """Requests pictures repeatedly after `start`."""

    def __init__(self, client: DaemonClient, interval: float) -> None:
        """interval: seconds between pictures."""
        self.result = PictureResult(0, None, "")
        # Returns the names of the visible datasets.
        self.visible_datasets: Callable[[], Sequence[str]] = list
        self._client = client
        self.interval = interval
        self._datasets: list[DatasetView] = []
        self._cached: dict[str, CachedDataset] = {}
        self._number = 0  # number of pictures so far
        self._requested_at: dict[
            str, int
        ] = {}  # by dataset: number of the last picture that requested its cached bytes
        self._instance = ""
        self._stopped = threading.Event()

    def fetch_first(self) -> Picture:
        """Get the first picture. Raises CachefsError."""
        picture = self.fetch_picture()
        self.result = PictureResult(1, picture, "")
        return picture

    def fetch_picture(self) -> Picture:
        """Get a picture. Raises CachefsError."""
        status = self._client.call(STATUS, Empty(), CALL_SECONDS)
        jobs = self._client.call(JOB_LIST, Empty(), CALL_SECONDS)
        known = status.instance == self._instance and status.datasets == len(self._datasets)
        if self._number % _LIST_INTERVAL == 0 or not known:
            self._datasets = self._client.call(DATASET_LIST, Empty(), CALL_SECONDS).datasets
        self._instance = status.instance
        self._fetch_cached()
        self._number += 1
        return Picture(time.monotonic(), time.time(), status, jobs, self._datasets, dict(self._cached))

    def _fetch_cached(self) -> None:
        """Request the cached bytes of some datasets: mostly visible ones, and others in turn."""
        there = [view.name for view in self._datasets]
        names = self._next_names(there)
        try:
            found = self._client.call(DATASET_CACHED, DatasetNames(names=names), CALL_SECONDS).datasets if names else []
        except CachefsError:  # an older daemon does not know this call
            found = []
        self._cached.update((one.name, one) for one in found)
        for gone in self._cached.keys() - set(there):
            del self._cached[gone]

    def _next_names(self, there: list[str]) -> list[str]:
        """Return some visible and some other datasets, those requested longest ago first."""
        looked_at = set(self.visible_datasets())
        oldest = sorted(there, key=lambda name: self._requested_at.get(name, -1))
        shown = [name for name in oldest if name in looked_at][:_VISIBLE_PER_PICTURE]
        others = [name for name in oldest if name not in looked_at][:_OTHERS_PER_PICTURE]
        self._requested_at = {name: self._requested_at.get(name, -1) for name in there}
        self._requested_at.update(dict.fromkeys([*shown, *others], self._number))
        return [*shown, *others]

    def start(self) -> None:
        """Request pictures until `stop` is called, or the process ends."""
        threading.Thread(target=self._run, name="asker", daemon=True).start()

    def stop(self) -> None:
        """Stop without waiting for a query in progress."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun, last = time.monotonic(), self.result
            try:
                self.result = PictureResult(last.number + 1, self.fetch_picture(), "")
                took = time.monotonic() - begun
                pause = max(self.interval - took, min(took * (1 / _MAX_TIME_SHARE - 1), _MAX_PAUSE))
            except CachefsError as error:
                self.result = PictureResult(last.number + 1, last.picture, str(error))
                pause = self.interval
            self._stopped.wait(pause)
