"""What a consumer says of itself, with a real plan and the sequences of a real snapshot."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from cachefs.job_messages import JobPublication, SampleMap
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.epoch_loader import EpochLoader, LoaderParts
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.blockstore import BLOCK_SIZE, memory_directory, opened, store_config


def with_consumer(directory: Path, files: int, check: Callable[[Consumer], None]) -> None:
    """Calls *check* once the plan knows the first epoch."""

    async def run() -> None:
        objects = [ListedObject(b"%05d" % number, 1000, 7, b"v") for number in range(files)]
        snapshot = Snapshot(
            build_snapshot_file(objects, "s3://bucket", BLOCK_SIZE, lambda key: b"s3:" + key, directory)
        )
        request = JobPublication(job="j", dataset="d", spec=SamplerSpec(kind="torch-distributed", size=files, epochs=9))
        threads = Threads()
        spaces: list[str] = []

        def begun(space: BlockSpace, now: float) -> None:
            assert space.snapshot not in store.plan.spaces  # nothing can have been fetched for it yet
            spaces.append(space.snapshot)

        with memory_directory() as root, opened(store_config(root)) as store:
            loader = EpochLoader(
                LoaderParts(
                    store.plan,
                    store.storage.presence_watch,
                    store.blocks,
                    cast(Fetcher, None),
                    threads,
                    PlanMemory(1 << 30),
                )
            )  # a tree of files needs none
            consumer = Consumer(request, snapshot, SampleMap(kind="tree"), store.plan, loader, begun)
            try:
                async with asyncio.timeout(20):
                    while consumer.position is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert spaces == [snapshot.id]
                check(consumer)
            finally:
                consumer.close()
                threads.close()

    virtual_time.run(run())


def test_a_heartbeat_is_told_of_in_samples_and_stops_the_tripwires(tmp_path: Path) -> None:
    def check(consumer: Consumer) -> None:
        now = time.monotonic()
        assert consumer.position is not None
        assert consumer.epoch_position is None
        assert consumer.make_view(0, now).state == "waiting"
        consumer.note_heartbeat(0, 100, now)
        assert consumer.epoch_position == (0, 100)
        assert consumer.position.tripwire_interval(now) == 0
        assert consumer.make_view(0, now).state == "following"
        silent = consumer.make_view(0, now + 12)
        assert (silent.state, silent.position) == ("standing still", 100)
        assert "no read of it seen for 12 s" in silent.problem
        consumer.liveness.renew(now + 11)  # as its reads do
        assert consumer.make_view(0, now + 12).state == "following"
        consumer.note_heartbeat(9, 0, now)
        assert "it reads epoch 9, and has published 9" in consumer.make_view(0, now).problem

    with_consumer(tmp_path, 200, check)


def test_an_interval_leaves_tripwires_in_a_short_epoch(tmp_path: Path) -> None:
    def check(consumer: Consumer) -> None:
        now = time.monotonic()
        assert consumer.position is not None
        assert (consumer.position.tripwire_interval(now), consumer.position.left_out_interval(now)) == (8, 8)

    with_consumer(tmp_path, 10, check)
