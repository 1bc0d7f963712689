"""What a consumer says of how far it may be, with a real plan and the sequences of a real snapshot."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.runtime.threads import Threads

from cachefs.job_messages import JobPublish, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build
from tests.blockstore import BLOCK_SIZE, memory_directory, opened, store_config


def with_consumer(directory: Path, files: int, check: Callable[[Consumer], None]) -> None:
    """Calls *check* once the plan knows the first epoch."""

    async def run() -> None:
        objects = [ListedObject(b"%05d" % number, 1000, 7, b"v") for number in range(files)]
        snapshot = Snapshot(build(objects, "s3://bucket", BLOCK_SIZE, lambda key: b"s3:" + key, directory))
        request = JobPublish(job="j", dataset="d", spec=SamplerSpec(kind="torch-distributed", size=files, epochs=9))
        threads = Threads()
        with memory_directory() as root, opened(store_config(root)) as store:
            sequences = EpochLoader(
                store.plan, store.storage.watch, store.blocks, cast(Fetcher, None), threads
            )  # a tree of files needs none
            consumer = Consumer(request, snapshot, SampleMap(kind="tree"), store.plan, sequences)
            try:
                async with asyncio.timeout(20):
                    while consumer.follower is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                check(consumer)
            finally:
                consumer.close()
                threads.close()

    asyncio.run(run())


def test_who_has_not_moved_since_his_rate_is_known_was_not_away_before(tmp_path: Path) -> None:
    """Workers of a loader read on while the first batch is missing: a rate, and no other place."""

    def check(consumer: Consumer) -> None:
        follower = consumer.follower
        assert follower is not None
        follower.begun, follower.rate = True, 1000.0
        now = 50_000.0
        assert (consumer.unseen(now), consumer.searched(now)) == (0, 0)
        assert (consumer.unseen(now + 1), consumer.searched(now + 1)) == (1000, 2000)
        consumer.told(0, 100)
        assert (consumer.unseen(now + 2), consumer.searched(now + 2)) == (0, 0)

    with_consumer(tmp_path, 200, check)


def test_an_interval_leaves_tripwires_in_a_short_epoch(tmp_path: Path) -> None:
    def check(consumer: Consumer) -> None:
        assert (consumer.tripwires, consumer.left_out) == (8, 8)

    with_consumer(tmp_path, 10, check)
