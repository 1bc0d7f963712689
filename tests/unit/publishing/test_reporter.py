"""What the helper does where the daemon does not take what it says."""

from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest

from cachefs.errors import Busy
from cachefs.job_messages import JobEpoch
from cachefs.publishing.published_consumer import PublishedConsumer
from cachefs.publishing.reporter import Reporter
from cachefs.rpc import DaemonClient


def test_an_epoch_that_is_too_far_ahead_is_published_again_when_it_is_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEFS_JOB", "train")
    tried: list[int] = []
    nearest = 2

    def call(method: Any, request: JobEpoch, timeout: float) -> None:
        tried.append(request.epoch)
        if request.epoch >= nearest:
            raise Busy("too far ahead")

    reporter = Reporter(cast(DaemonClient, SimpleNamespace(call=call)), 1)
    reported: set[tuple[int, int]] = set()
    consumer: Any = SimpleNamespace(
        shares=[SimpleNamespace(order=lambda samples: samples)],
        epoch=0,
        opening=SimpleNamespace(name="0"),
        reported=reported,
        unreported=lambda number: [epoch for epoch in range(5) if (number, epoch) not in reported],
        order=lambda epoch: numpy.array([epoch], numpy.uint32),
    )
    for _ in range(3):  # a report every quarter of a second
        reporter._report_orders(cast(PublishedConsumer, consumer))
    assert tried == [0, 1, 2]
    consumer.epoch, nearest = 1, 3
    reporter._report_orders(cast(PublishedConsumer, consumer))
    assert tried == [0, 1, 2, 2, 3]
    assert reported == {(0, 0), (0, 1), (0, 2)}
