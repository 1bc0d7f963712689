"""The state of the daemon at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cachefs.job_messages import JobList
from cachefs.messages import CachedDataset, DatasetView, Status
from cachefs_tools.cachectl.job_page import job_document


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
