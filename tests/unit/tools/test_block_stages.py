"""Stacks of the daemon, shared out to the stages of a block's way."""

import pytest

from cachefs_bench.block_budget import BlockStage, seconds_by_stage, stack_stage

_SRC = "/src/cachefs_daemon"


@pytest.mark.parametrize(
    ("frames", "stage"),
    [
        ([f"S3Origin._read ({_SRC}/origin/s3.py:9)", "Client.get (/lib/aiobotocore/client.py:3)"], BlockStage.GET),
        ([f"Fetcher._bring ({_SRC}/fetch/fetcher.py:1)", f"S3Origin.read ({_SRC}/origin/s3.py:9)"], BlockStage.GET),
        (
            [f"BlockStore.put ({_SRC}/store/block_store.py:1)", "piece_checksums (/x/block.py:4)"],
            BlockStage.CHECKSUM,
        ),
        # A copy to the tier below is written for the sake of the block that is evicted.
        (
            [
                f"Transfers.evict_blocks ({_SRC}/store/transfers.py:1)",
                f"write_record ({_SRC}/store/segment_writer.py:2)",
            ],
            BlockStage.EVICTION,
        ),
        (
            [f"Tier.write ({_SRC}/store/tier.py:1)", f"write_record ({_SRC}/store/segment_writer.py:2)"],
            BlockStage.TIER_WRITE,
        ),
        (["Handle._run (/python/asyncio/events.py:80)"], BlockStage.LOOP),
        (["something (/nowhere.py:1)"], BlockStage.OTHER),
    ],
)
def test_a_stack_belongs_to_the_stage_of_its_innermost_frame_that_has_one(frames: list[str], stage: BlockStage) -> None:
    assert stack_stage(frames) is stage


def test_each_threads_time_is_shared_out_by_its_own_samples() -> None:
    stacks = [
        f"thread (7): MainThread;S3Origin.read ({_SRC}/origin/s3.py:9) 3",
        "thread (7): MainThread;Handle._run (/python/asyncio/events.py:80) 1",
        "thread (7): MainThread;EpollSelector.select (/python/selectors.py:468) 96",
        f"thread (8): urgent_0;Tier.write ({_SRC}/store/tier.py:1) 100",
    ]
    found = seconds_by_stage(stacks, {7: 4.0, 8: 1.0, 9: 0.5})
    assert {stage: seconds for stage, seconds in found.items() if seconds} == {
        BlockStage.GET: 3.0, BlockStage.LOOP: 1.0, BlockStage.TIER_WRITE: 1.0, BlockStage.GRPC: 0.5,
    }  # fmt: skip
