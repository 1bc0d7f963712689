"""What other nodes learn of consumers: encoded where it is new, and said at the job where they would not take it."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cachefs.job_messages import JobPublication
from cachefs_cluster.directory import shared_consumers
from cachefs_cluster.directory.shared_consumers import SharedConsumers
from cachefs_cluster.sharing.sections import CONSUMERS, ConsumerFacts
from cachefs_daemon.jobs.sample_maps import TREE
from tests import virtual_time
from tests.sharing import SharingNode, sharing_nodes


class Reader:
    """As much of a consumer as other nodes are told."""

    def __init__(self, name: str, **more: Any) -> None:
        self.request = JobPublication(job="train", dataset="data", consumer=name, **more)
        self.name, self.key = name, f"train/{name}#1"
        self.snapshot = SimpleNamespace(id="0" * 32)
        self.sample_map = TREE
        self.published_orders: dict[int, Any] = {}
        self.epoch_position, self.rate = None, 0.0
        self.unshared: list[str] = []

    def note_unshared(self, why: str) -> None:
        self.unshared.append(why)


def told(node: SharingNode, readers: list[Reader]) -> SharedConsumers:
    jobs = SimpleNamespace(consumers=readers)
    return SharedConsumers(jobs, node.shared, node.blobs)  # type: ignore[arg-type]


def test_a_consumer_is_encoded_when_something_of_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with sharing_nodes(1) as (node,):
            encoded: list[str] = []
            publish = node.shared.publish

            def counted(section: Any, name: str, value: ConsumerFacts) -> str:
                encoded.append(name)
                return publish(section, name, value)

            monkeypatch.setattr(node.shared, "publish", counted)
            one, two = Reader("0"), Reader("1")
            sharing = told(node, [one, two])
            for _ in range(5):
                await sharing._publish_changes()
            assert encoded == ["train/0", "train/1"]
            two.published_orders = {0: np.arange(7, dtype=np.uint32)}
            for _ in range(5):
                await sharing._publish_changes()
            assert encoded == ["train/0", "train/1", "train/1"]
            facts = node.shared.own_value(CONSUMERS, "train/1")
            assert facts is not None
            assert [order.samples for order in facts.orders] == [7]

    virtual_time.run(scenario())


def test_what_others_would_not_take_is_logged_once_and_said_at_the_job(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_consumers, "RETRY_SECONDS", 0.0)  # each look tries again

    async def scenario() -> None:
        async with sharing_nodes(1) as (node,):
            wrong = Reader("0", world_size=1 << 33)
            sharing = told(node, [wrong])
            for _ in range(20):
                await sharing._publish_changes()
            assert "world size" in wrong.unshared[-1]
            wrong.request = JobPublication(job="train", dataset="data", consumer="0")
            await sharing._publish_changes()
            assert wrong.unshared[-1] == ""
            assert node.shared.publishes(CONSUMERS, "train/0")

    with caplog.at_level(logging.WARNING):
        virtual_time.run(scenario())
    assert [one.getMessage() for one in caplog.records if "cannot be published" in one.getMessage()] == [
        "consumers 'train/0' cannot be published to other nodes: rank 0 of 8589934592: expected a rank below the "
        "world size, and a world size below 4,294,967,296"
    ]


def test_a_sample_map_that_is_too_large_is_said_once_and_at_the_job(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_consumers, "MAX_BLOB", 10)

    async def scenario() -> None:
        async with sharing_nodes(1) as (node,):
            large = Reader("0")
            large.sample_map = shared_consumers.SampleMap(kind="files", entries=bytes(400))
            sharing = told(node, [large])
            for _ in range(5):
                await sharing._publish_changes()
            assert large.unshared[-1].startswith("its sample map has ")
            assert not node.shared.publishes(CONSUMERS, "train/0")

    with caplog.at_level(logging.WARNING):
        virtual_time.run(scenario())
    assert sum("is not published to other nodes" in one.getMessage() for one in caplog.records) == 1
