"""Pictures of a node for tests of `cachectl top`: of any number of datasets, jobs and mounts."""

import dataclasses
from typing import Any

import msgspec

from cachefs.job_messages import ConsumerView, JobList, JobView
from cachefs.messages import CachedDataset, DatasetView, MountView, Status, TierStatus
from cachefs_tools.cachectl.top.history import RateHistory
from cachefs_tools.cachectl.top.picture import Picture

NOON = 1_800_000_000.0


def status(*, hits: int = 0, **fields: Any) -> Status:
    """hits: of each tier."""
    tiers = [
        TierStatus(
            name=name, directory=f"/{name}", budget=1 << 30, limit=1 << 30, used=700 << 20, blocks=7, segments=3,
            hits=hits, hit_bytes=0, evicted=0, policy="clairvoyant",
        )
        for name in ("memory", "ssd")
    ]  # fmt: skip
    usual: dict[str, Any] = {
        "instance": "a", "version": "1.2.3", "pid": 7, "uptime": 3725.0, "state_dir": "/state", "tiers": tiers,
        "datasets": 1, "misses": 0, "fetched_blocks": 0, "fetched_bytes": 0, "origin_requests": 0, "origin_errors": 0,
        "in_flight_blocks": 0, "in_flight_bytes": 0, "repairs": 0, "warmups": 0, "index_blocks": 0,
        "mounts": [mount(0)],
    }  # fmt: skip
    return Status(**{**usual, **fields})


def mount(number: int, **counters: int) -> MountView:
    return MountView(
        id=f"m{number}", mountpoint=f"/mnt/{number}", spec="images", pid=number, alive=True, seconds_since_report=0.0,
        counters=counters,
    )  # fmt: skip


def dataset(number: int, name: str = "") -> DatasetView:
    return DatasetView(
        name=name or f"set-{number:04}", url=f"s3://bucket/{number}", snapshot="3f9c", path="/p", files=1000,
        directories=1, bytes=(number + 1) << 20, created_ns=0,
    )  # fmt: skip


def job(number: int, name: str = "", **fields: Any) -> JobView:
    consumer = ConsumerView("0", 3, 250, 1000, [3, 4], 100.0 + number, 0, 0, "following")
    usual: dict[str, Any] = {
        "job": name or f"train-{number:02}", "dataset": "images", "snapshot": "3f9c", "source": "cachefs run",
        "started": NOON, "state": "running", "consumers": [consumer],
    }  # fmt: skip
    return JobView(**{**usual, **fields})


def picture(when: float = 0.0, *, datasets: int = 1, jobs: int = 1, **fields: Any) -> Picture:
    """fields: of the status; `hits` as above. All of each dataset with an even number is cached."""
    views = [dataset(number) for number in range(datasets)]
    cached = {
        view.name: CachedDataset(name=view.name, bytes=view.bytes, memory=view.bytes, ssd=0, is_estimate=False)
        for view in views[::2]
    }
    return Picture(
        when=when, unix_time=NOON + when, status=status(datasets=datasets, **fields),
        jobs=JobList([job(number) for number in range(jobs)]), datasets=views, cached=cached,
    )  # fmt: skip


def history_of(what: Picture) -> RateHistory:
    """What is known when this is the second picture, and all has gone on at the rate of each consumer for a second."""

    def back(view: JobView) -> JobView:
        consumers = [msgspec.structs.replace(one, position=one.position - round(one.rate)) for one in view.consumers]
        return msgspec.structs.replace(view, consumers=consumers)

    history = RateHistory()
    history.add_picture(
        dataclasses.replace(what, when=what.when - 1, jobs=JobList([back(view) for view in what.jobs.jobs]))
    )
    history.add_picture(what)
    return history
