"""Rates between pictures of a node."""

import dataclasses

import msgspec

from cachefs.job_messages import ConsumerView, JobList, LoaderView
from cachefs.messages import PeerCounts
from cachefs_tools.cachectl.top.history import MAX_POINTS, RateHistory, relative_levels, stalled_share
from cachefs_tools.cachectl.top.picture import Picture
from tests.unit.tools.pictures import job, mount, picture


def test_a_rate_is_what_changed_in_a_second() -> None:
    history = RateHistory()
    history.add_picture(picture(0.0, fetched_bytes=1000, hits=10))
    assert history.rate("origin") == 0.0
    history.add_picture(picture(2.0, fetched_bytes=5000, hits=30, misses=6, peers=PeerCounts(bytes=800)))
    assert history.rate("origin") == 2000.0
    assert history.rate("peers in") == 400.0
    assert history.rate("misses") == 3.0
    assert history.rate("reads") == 23.0  # of both tiers, and misses
    assert history.hits == {"memory": 10.0, "ssd": 10.0}


def test_mounts_have_rates_of_their_own() -> None:
    history = RateHistory()
    history.add_picture(picture(0.0, mounts=[mount(1, read=10, requests=100)]))
    history.add_picture(picture(0.5, mounts=[mount(1, read=20, requests=90), mount(2, read=5)]))
    assert history.mounts == {("m1", "read"): 20.0, ("m1", "requests"): 0.0}  # the second one was not there before


def test_what_a_daemon_counted_before_a_restart_does_not_count() -> None:
    history = RateHistory()
    history.add_picture(picture(0.0, fetched_bytes=10**9))
    history.add_picture(picture(1.0, fetched_bytes=2 * 10**9))
    history.add_picture(picture(2.0, fetched_bytes=50, instance="b"))
    assert list(history.flows["origin"]) == [10**9]
    history.add_picture(picture(3.0, fetched_bytes=150, instance="b"))
    assert list(history.flows["origin"]) == [10**9, 100.0]


def test_a_job_waits_a_share_of_the_last_seconds() -> None:
    history = RateHistory()
    waited = {0.0: 0.0, 1.0: 0.5, 2.0: 1.0, 15.0: 1.0, 16.0: 1.0}
    shares = []
    for when, seconds in waited.items():
        jobs = JobList([job(0, "train", stall_seconds=seconds), *([job(1, "new")] if when else [])])
        history.add_picture(dataclasses.replace(picture(when), jobs=jobs))
        shares.append(history.waited.get("train"))
    assert shares == [None, 0.5, 0.5, 0.0, 0.0]  # what is longer ago is forgotten
    assert history.waited["new"] == 0.0


def test_where_programs_say_how_long_their_loops_waited_that_counts() -> None:
    def at(when: float, *loaders: LoaderView) -> Picture:
        consumers = [
            msgspec.structs.replace(ConsumerView(str(n), 0, 0, 100, [], 0.0, 0, 0, ""), loader=one)
            for n, one in enumerate(loaders)
        ]
        return dataclasses.replace(
            picture(when), jobs=JobList([job(0, "train", consumers=consumers, stall_seconds=3 * when)])
        )

    history = RateHistory()
    history.add_picture(at(0.0, LoaderView("Train", busy=10.0, waited=8.0), LoaderView("Val", busy=5.0, waited=5.0)))
    history.add_picture(at(4.0, LoaderView("Train", busy=14.0, waited=9.0), LoaderView("Val", busy=5.0, waited=5.0)))
    assert history.waited == {"train": 0.25}  # of the training; the validation does nothing now


def test_a_job_is_as_quick_as_its_consumers_together() -> None:
    def at(when: float, epoch: int, *positions: int) -> Picture:
        consumers = [ConsumerView(str(n), epoch, place, 100, [], 0.0, 0, 0, "") for n, place in enumerate(positions)]
        return dataclasses.replace(picture(when), jobs=JobList([job(0, "train", consumers=consumers)]))

    history = RateHistory()
    history.add_picture(at(0.0, 0, 10, 50))
    history.add_picture(at(2.0, 0, 20, 80))
    assert history.samples == {"train": 20.0}
    history.add_picture(at(4.0, 1, 0, 20, 7))  # the next epoch; and a consumer of which nothing was known
    assert history.samples == {"train": (90 + 70) / 4}


def test_readers_that_wait_at_once_count_as_waiting_all_the_time() -> None:
    assert stalled_share(30.0, 10.0, 2) == 1.0
    assert stalled_share(5.0, 10.0, 2) == 0.25
    assert stalled_share(-1.0, 10.0, 1) == 0.0


def test_points_are_bounded_and_scaled() -> None:
    history = RateHistory()
    for number in range(3 * MAX_POINTS):
        history.add_picture(picture(float(number), fetched_bytes=number * number))
    assert len(history.flows["origin"]) == MAX_POINTS
    assert relative_levels([1.0, 4.0, 2.0], 5) == [0.0, 0.0, 0.25, 1.0, 0.5]
    assert relative_levels([1.0, 4.0, 2.0], 1) == [1.0]
    assert relative_levels([], 3) == relative_levels([0.0], 3) == [0.0] * 3
