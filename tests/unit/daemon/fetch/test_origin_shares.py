"""What jobs want of an origin, what they get, and who is held back."""

from collections import Counter
from collections.abc import Mapping

import pytest

from cachefs.planning.prefetch.job_demand import JobDemand
from cachefs.trouble_texts import Cause, describe_trouble
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter, ReadPurpose
from cachefs_daemon.fetch.origin_shares import OriginShares, OriginUse
from cachefs_daemon.origin.endpoint import Endpoint

MIB = 1 << 20


class Scene:
    """A server that gives two jobs 10 MiB/s each; `a` wants 30 and has reads that wait, `b` wants 10."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("store", 4)
        self.limiter = ConcurrencyLimiter(4, 1 << 30)
        self.now = 1000.0
        self.wants = {"a": 30 * MIB, "b": 10 * MIB}
        self.gets = {"a": 10 * MIB, "b": 10 * MIB}
        self.fetched: Counter[tuple[str, Endpoint]] = Counter()
        self.shares = OriginShares(self.limiter, self.fetched, self._demands, lambda _: self.endpoint)
        self.shares._sampled_at = self.now
        for number in range(8):
            permit = self.limiter.new_permit(bytes([number]), 1, self.endpoint, ahead=False, purpose=ReadPurpose("a"))
            permit.request(lambda: None)

    def _demands(self) -> Mapping[str, JobDemand]:
        return {job: JobDemand({"snapshot": want}, None) for job, want in self.wants.items()}

    def sample(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.fetched.update({(job, self.endpoint): size for job, size in self.gets.items()})
            self.shares.sample(self.now)


def test_a_job_that_gets_less_than_it_wants_while_its_reads_wait_is_held_back_and_told_its_share() -> None:
    scene = Scene()
    scene.limiter.weights["a"] = 2.0
    scene.sample(60)
    [held] = scene.shares.shares_of("a")
    [satisfied] = scene.shares.shares_of("b")
    assert (held.held_back, satisfied.held_back, scene.shares.held_back) == (True, False, 1)
    assert (held.wants, held.gets, held.all_want, held.all_get) == pytest.approx(
        (30 * MIB, 10 * MIB, 40 * MIB, 20 * MIB), rel=0.01
    )
    assert held.share == pytest.approx(20 * MIB * 2 / 3, rel=0.01)
    [trouble] = scene.shares.troubles_of("a")
    assert (trouble.cause, trouble.subject) == (Cause.SHARE, "store")
    text = describe_trouble(trouble, trouble.since + 60)
    assert text.startswith("store has been over-subscribed for 1 min 0 s: 2 jobs want 40"), text
    assert text.endswith("with weight 2"), text
    assert scene.shares.troubles_of("b") == []


def test_a_job_that_has_gone_leaves_nothing() -> None:
    scene = Scene()
    scene.sample(30)
    scene.wants.clear()
    scene.gets.clear()
    scene.limiter._queues.clear()
    scene.sample(120)
    assert not scene.fetched
    scene.fetched["a", scene.endpoint] = 1 * MIB  # it comes back
    scene.now += 1.0
    scene.shares.sample(scene.now)
    assert scene.shares.shares_of("a")[0].gets > 0
    scene.sample(120)
    assert (scene.shares.local_uses, scene.shares.held_back, scene.shares.shares_of("a")) == ({}, 0, [])


def test_what_other_nodes_fetch_for_a_job_counts_with_what_this_node_does() -> None:
    scene = Scene()
    scene.sample(60)
    scene.shares.take_remote_uses(
        {"other": {"store": {"a": OriginUse(20 * MIB, 5 * MIB, 1.0), "c": OriginUse(1.0 * MIB, 0, 0)}}}
    )
    [share] = scene.shares.shares_of("a")
    assert (share.wants, share.gets, share.jobs) == (
        pytest.approx(50 * MIB, rel=0.01),
        pytest.approx(15 * MIB, rel=0.01),
        3,
    )
