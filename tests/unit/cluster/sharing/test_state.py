import asyncio

from cachefs_cluster.sharing.sections import (
    CONSUMERS,
    MOUNTED,
    PROGRESS,
    ConsumerFacts,
    ConsumerProgress,
    MountedDataset,
)
from tests import virtual_time
from tests.sharing import sharing_nodes
from tests.waiting import until_async

DIGEST = "0123456789abcdef" * 2


def facts(job: str = "train", consumer: str = "0", rank: int = 0) -> ConsumerFacts:
    return ConsumerFacts(job=job, consumer=consumer, dataset="data", snapshot=DIGEST, rank=rank, world_size=64)


def test_what_one_node_publishes_all_others_learn():
    async def scenario() -> None:
        async with sharing_nodes(3) as nodes:
            first, *others = nodes
            heard: list[tuple[str, str, object]] = []
            others[0].shared.add_listener(MOUNTED, lambda *news: heard.append(news))
            value = MountedDataset(mountpoint="/mnt/data")
            first.shared.publish(MOUNTED, "data", value)
            for other in others:
                await until_async(
                    lambda other=other: other.shared.remote_value(MOUNTED, first.record.id, "data") == value
                )
            first.shared.remove(MOUNTED, "data")
            for other in others:
                await until_async(lambda other=other: not other.shared.remote_values(MOUNTED))
            assert heard == [(first.record.id, "data", value), (first.record.id, "data", None)]

    virtual_time.run(scenario())


def test_progress_goes_to_those_who_follow_the_job():
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second):
            first.shared.publish(CONSUMERS, "train/0", facts())
            first.shared.publish(PROGRESS, "train/0", ConsumerProgress(0, 17, 100.0))
            await until_async(lambda: second.consumers.remote_consumers())
            await until_async(lambda: second.consumers.remote_consumers()[0].progress)
            (consumer,) = second.consumers.remote_consumers()
            assert consumer.facts == facts()
            assert consumer.progress == ConsumerProgress(0, 17, 100.0)
            first.shared.publish(PROGRESS, "train/0", ConsumerProgress(1, 3, 100.0))
            await until_async(lambda: second.consumers.remote_consumers()[0].progress == ConsumerProgress(1, 3, 100.0))

    virtual_time.run(scenario())


def test_a_node_says_no_more_values_than_others_take():
    async def scenario() -> None:
        async with sharing_nodes(1) as (node,):
            for number in range(MOUNTED.max_values):
                assert node.shared.publish(MOUNTED, f"d{number}", MountedDataset(mountpoint="/m")) == ""
            assert "already" in node.shared.publish(MOUNTED, "more", MountedDataset(mountpoint="/m"))
            assert node.shared.publish(MOUNTED, "d0", MountedDataset(mountpoint="/other")) == ""
            node.shared.remove(MOUNTED, "d1")
            assert node.shared.publish(MOUNTED, "more", MountedDataset(mountpoint="/m")) == ""

    virtual_time.run(scenario())


def test_a_node_that_catches_up_has_heard_all_and_waits_for_no_silent_node():
    async def scenario() -> None:
        async with sharing_nodes(3) as (first, second, silent):
            await until_async(lambda: all(one.response_count for one in first.shared._followers.values()))
            value = MountedDataset(mountpoint="/mnt/data")
            second.shared.publish(MOUNTED, "data", value)
            assert not first.shared.remote_values(MOUNTED)
            await first.shared.catch_up(5.0)
            assert first.shared.remote_value(MOUNTED, second.record.id, "data") == value
            await silent.shared.stop()
            began = asyncio.get_running_loop().time()
            await first.shared.catch_up(5.0)
            assert 5.0 <= asyncio.get_running_loop().time() - began < 5.1  # of virtual time

    virtual_time.run(scenario())
