"""How `cachectl top` asks the daemon: what one picture costs is bounded, and nothing that fails ends it."""

from typing import Any, cast

import pytest

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobList
from cachefs.messages import CachedDataset, CachedDatasets, DatasetList, DatasetNames
from cachefs.rpc import DATASET_CACHED, DATASET_LIST, JOB_LIST, STATUS, DaemonClient
from cachefs_tools.cachectl.top.picture import PictureSource
from tests.unit.tools.pictures import dataset, job, status


class Daemon:
    """Answers as a daemon with some datasets does."""

    def __init__(self, datasets: int = 0) -> None:
        self.views = [dataset(number) for number in range(datasets)]
        self.instance = "a"
        self.asked: list[Any] = []
        self.names: list[str] = []  # of all datasets of which was asked what is cached
        self.failure: CachefsError | None = None
        self.knows_cached = True

    def call(self, method: Any, request: Any, timeout: float) -> Any:
        self.asked.append(method)
        if self.failure is not None:
            raise self.failure
        if method is STATUS:
            return status(datasets=len(self.views), instance=self.instance)
        if method is JOB_LIST:
            return JobList([job(0)])
        if method is DATASET_LIST:
            return DatasetList(datasets=self.views)
        assert method is DATASET_CACHED
        if not self.knows_cached:
            raise CachefsError("the daemon failed: Method not found!")
        names = cast(DatasetNames, request).names
        self.names += names
        return CachedDatasets(
            datasets=[CachedDataset(name=name, bytes=9, memory=4, ssd=1, is_estimate=True) for name in names]
        )


def asker_of(daemon: Daemon, interval: float = 0.01) -> PictureSource:
    return PictureSource(cast(DaemonClient, daemon), interval)


def test_a_picture_of_a_thousand_datasets_costs_no_more_than_of_ten() -> None:
    daemon = Daemon(1000)
    asker = asker_of(daemon)
    asker.visible_datasets = lambda: [f"set-{number:04}" for number in range(500, 510)]
    pictures = [asker.fetch_picture() for _ in range(9)]
    assert daemon.asked.count(DATASET_LIST) == 1
    assert daemon.asked.count(DATASET_CACHED) == len(pictures)
    assert len(daemon.names) <= 6 * len(pictures)
    # Those that somebody looks at are known soon, and asked for again and again; the others in turn.
    assert set(asker.visible_datasets()) <= set(pictures[2].cached)
    assert daemon.names.count("set-0500") >= 3
    assert len(set(daemon.names)) == 10 + 2 * len(pictures)


def test_the_list_is_asked_for_anew_where_it_may_be_another() -> None:
    daemon = Daemon(3)
    asker = asker_of(daemon)
    asker.fetch_picture()
    daemon.views = daemon.views[:2]
    assert [view.name for view in asker.fetch_picture().datasets] == ["set-0000", "set-0001"]
    assert set(asker.fetch_picture().cached) == {"set-0000", "set-0001"}
    daemon.instance, daemon.views = "b", [dataset(7), dataset(8)]
    assert [view.name for view in asker.fetch_picture().datasets] == ["set-0007", "set-0008"]
    for _ in range(12):
        asker.fetch_picture()
    assert daemon.asked.count(DATASET_LIST) == 4  # once in a while all the same


def test_an_older_daemon_does_not_know_what_is_cached() -> None:
    daemon = Daemon(3)
    daemon.knows_cached = False
    assert asker_of(daemon).fetch_picture().cached == {}


def test_while_the_daemon_is_away_the_last_picture_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(1)
    asker = asker_of(daemon)
    daemon.failure = DaemonUnavailable("gone")
    with pytest.raises(DaemonUnavailable):
        asker.fetch_first()
    daemon.failure = None
    first = asker.fetch_first()
    daemon.failure = DaemonUnavailable("gone")

    def after_the_first() -> None:
        assert (asker.result.problem, asker.result.picture is first) == ("gone", True)
        daemon.failure = None

    def after_the_second() -> None:
        assert (asker.result.problem, asker.result.picture is first) == ("", False)
        asker.stop()

    steps = iter((after_the_first, after_the_second))
    monkeypatch.setattr(asker._stopped, "wait", lambda _: next(steps)())
    asker._run()
