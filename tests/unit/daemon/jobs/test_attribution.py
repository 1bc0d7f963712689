"""Whose reads and stalls a report holds, with followers of a real plan and no daemon."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from cachefs.messages import Stall
from cachefs.planning.pagecache.model import HELD
from cachefs.planning.pagecache.push_lookahead import PushReader, all_tripwires
from cachefs.planning.pagecache.states import OUT
from cachefs.planning.sequences.follower import SequenceFollower
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.position_estimate import PositionEstimate
from cachefs.planning.sequences.tripwires import UNKNOWN_RATE_INTERVAL
from cachefs_daemon.jobs.attribution import MAX_HIDDEN_RATIO, Attribution
from cachefs_daemon.jobs.liveness import PublisherLiveness
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.stalls import Stalls
from tests.simulated import space_of

COUNT = 1000
NOW = 500.0


class Node:
    """A plan, and one job per consumer that reads all of its space."""

    def __init__(self, *orders: npt.NDArray[np.int64]) -> None:
        self.space = space_of([1000] * COUNT, "s")
        self.plan = Plan()
        self.plan.add_space(self.space)
        self.jobs: Any = SimpleNamespace(consumers=[], stalls=Stalls(), note_fetched_block=self._fetched)
        self.fetched: dict[str, int] = {}
        self.attribution = Attribution(self.plan, cast(JobRegistry, self.jobs))
        for number, order in enumerate(orders):
            key = f"job{number}"
            self.plan.set_epoch(key, "s", 0, order)
            request = SimpleNamespace(job=key, workers=0, heartbeats=False)
            self.jobs.consumers.append(
                SimpleNamespace(
                    key=key, name="0", request=request, shown_epoch=0, snapshot=SimpleNamespace(id="s"),
                    position=PositionEstimate(SequenceFollower(self.plan, key, 0), 1),
                    liveness=PublisherLiveness(0, 60, 0.0), update_position=lambda: None,
                )
            )  # fmt: skip

    def keys(self, blocks: Any) -> list[bytes]:
        return self.space.keys(np.asarray(blocks))

    def _fetched(self, key: str, block: int, size: int, via: str) -> None:
        name = f"{key} {via}".strip()
        self.fetched[name] = self.fetched.get(name, 0) + size


def test_reads_are_those_of_the_consumer_whose_sequence_has_them_next() -> None:
    one, two = np.random.default_rng(1).permutation(COUNT), np.random.default_rng(2).permutation(COUNT)
    node = Node(one, two)
    observed = node.attribution.note_reads([*node.keys(one[:20]), b"\xff" * 20], [], NOW)
    assert observed.own_reads == {"job0": 20}
    assert observed.tripwires_read == {}
    assert [node.plan.progress(f"job{number}") for number in (0, 1)] == [(0, 20), (0, 0)]
    assert [consumer.liveness.silence(NOW) for consumer in node.jobs.consumers] == [0.0, NOW]


def test_reads_are_no_sign_of_life_of_who_says_by_itself_that_it_is_there() -> None:
    """Another job may read the same files, and would keep one that has ended alive."""
    order = np.random.default_rng(1).permutation(COUNT)
    node = Node(order)
    (consumer,) = node.jobs.consumers
    consumer.request.heartbeats = True
    assert node.attribution.note_reads(node.keys(order[:20]), [], NOW).own_reads == {"job0": 20}
    assert consumer.liveness.silence(NOW) == NOW


def test_reads_that_are_reported_after_the_plans_have_ended_are_nobodys() -> None:
    one, two = np.random.default_rng(1).permutation(COUNT), np.random.default_rng(2).permutation(COUNT)
    node = Node(one, two)
    for consumer in node.jobs.consumers:
        node.plan.remove_consumer(consumer.key)
    keys = node.keys(one[:20])
    assert node.attribution.note_reads(keys, [Stall(keys[0], 0.5, "origin")], NOW).own_reads == {}


def test_a_stall_is_that_of_the_consumer_that_reads_the_block_next() -> None:
    one, two = np.random.default_rng(1).permutation(COUNT), np.random.default_rng(2).permutation(COUNT)
    node = Node(one, two)
    [key] = node.keys(two[:1])
    stalls = [Stall(key=key, seconds=0.5, source="origin"), Stall(key=b"\xff" * 20, seconds=2.0, source="ssd")]
    node.attribution.note_reads([], stalls, NOW)
    rows = {(row.job, row.consumer, row.source): row.seconds for row in node.jobs.stalls.stall_rows()}
    assert rows == {("job1", "0", "origin"): 0.5, ("", "", "ssd"): 2.0}
    assert node.fetched == {"job1": 1000}
    observed = node.attribution.note_reads([], [Stall(key=key, seconds=0.25, source="peer b")], NOW)
    assert list(observed.late_seconds) == [0.25]
    assert node.fetched == {"job1": 1000, "job1 peer b": 1000}


def test_of_a_single_consumer_every_stall_on_its_snapshot_is_its_own() -> None:
    node = Node(np.arange(COUNT))
    [key] = node.keys([COUNT - 1])
    node.attribution.note_reads([], [Stall(key=key, seconds=0.5, source="ssd")], NOW)
    assert node.jobs.stalls.waited_of_job("job0") == (1, 0.5)
    assert node.fetched == {}


def test_a_failed_read_is_that_of_the_only_job_that_reads_the_block_next() -> None:
    one, two = np.random.default_rng(1).permutation(COUNT), np.random.default_rng(2).permutation(COUNT)
    node = Node(one, two)
    both = np.concatenate((one[:1], two[:1], [one[500]]))
    found = node.attribution.attribute_failed_reads("s", [*node.keys(both), b"\xff" * 20])
    assert found == [("job0", True), ("job1", True), ("", False), (None, False)]
    assert node.attribution.attribute_failed_reads("other", node.keys(both)) == [(None, False)] * 3


def test_a_failed_read_that_may_be_of_two_jobs_is_of_none_of_them() -> None:
    order = np.random.default_rng(1).permutation(COUNT)
    node = Node(order, order)
    assert node.attribution.attribute_failed_reads("s", node.keys(order[:1])) == [("", False)]


def test_a_failed_read_is_that_of_the_only_job_that_may_read_it() -> None:
    node = Node(np.arange(COUNT), np.arange(COUNT - 100))
    well, broken = node.jobs.consumers
    well.position = None  # it has not begun to follow
    broken.position = PositionEstimate(SequenceFollower(node.plan, broken.key, 0, 1, np.arange(COUNT) < COUNT - 100), 1)
    assert node.attribution.attribute_failed_reads("s", node.keys([COUNT - 1, COUNT - 101])) == [
        ("job0", False),
        ("", False),
    ]
    node.jobs.consumers.remove(well)
    assert node.attribution.attribute_failed_reads("s", node.keys([COUNT - 1, COUNT - 101])) == [
        (None, False),
        ("job1", False),
    ]


def test_tripwires_say_where_a_consumer_is_whose_other_pages_are_in_the_page_cache() -> None:
    node = Node(np.arange(COUNT))
    pages = {"s": np.full(COUNT, HELD, np.uint8)}
    observed = node.attribution.note_reads(node.keys([31]), [], NOW, pages)
    assert observed.tripwires_read["s"].tolist() == [31]
    assert observed.own_reads == {"job0": 1}
    assert node.plan.progress("job0") == (0, 32)
    assert node.jobs.consumers[0].position.follower.observed_share.hidden_ratio == MAX_HIDDEN_RATIO


@pytest.mark.parametrize("seed", range(6))
def test_tripwires_that_another_consumer_reads_do_not_carry_one_away(seed: int) -> None:
    """What shows of the reads of both are the tripwires of both."""
    draw = np.random.default_rng(seed)
    orders = [[draw.permutation(COUNT) for _ in range(4)] for _ in range(2)]
    node = Node(*(epochs[0] for epochs in orders))
    for number, epochs in enumerate(orders):
        for epoch, order in enumerate(epochs):
            node.plan.set_epoch(f"job{number}", "s", epoch, order)
    readers = [PushReader(f"job{number}", "s", 0, 0, UNKNOWN_RATE_INTERVAL) for number in (0, 1)]
    shows, seen = all_tripwires(node.plan, readers)["s"], list[int]()
    for read in range(COUNT):
        for epochs in orders:
            block = int(epochs[0][read])
            if shows[block]:
                seen.append(block)
                shows[block] = False
        if len(seen) >= 12:
            pages = {"s": np.where(shows, OUT, HELD).astype(np.uint8)}
            node.attribution.note_reads(node.keys(seen), [], NOW, pages)
            shows, seen = all_tripwires(node.plan, readers)["s"], []
            for epoch, position in (node.plan.progress(f"job{number}") for number in (0, 1)):
                assert epoch * COUNT + position <= read + 1 + 2 * UNKNOWN_RATE_INTERVAL
    assert min(node.plan.progress(f"job{number}") for number in (0, 1)) >= (0, COUNT // 2)


def test_reads_of_blocks_that_are_no_samples_of_a_consumer_say_nothing_of_it() -> None:
    """A job's train loader has published nothing; its validation loader, which has, does not read yet."""
    node = Node(np.arange(COUNT - 100, COUNT))
    own = np.arange(COUNT) >= COUNT - 100
    [consumer] = node.jobs.consumers
    consumer.position = PositionEstimate(SequenceFollower(node.plan, consumer.key, 0, 1, own), 1)
    trained = np.random.default_rng(1).permutation(COUNT - 100)
    [key] = node.keys(trained[:1])
    node.attribution.note_reads(node.keys(trained[:180]), [Stall(key=key, seconds=2.0, source="origin")], NOW)
    evidence = consumer.position.follower.evidence
    assert (evidence.matched, evidence.mismatched, consumer.position.follower.is_following) == (0, 0, True)
    assert node.jobs.stalls.waited_of_job(consumer.key) == (0, 0.0)
    node.attribution.note_reads(node.keys(np.arange(COUNT - 100, COUNT - 60)), [], NOW)
    assert (evidence.matched, evidence.mismatched) == (40, 0)
    assert node.plan.progress(consumer.key) == (0, 40)
