"""Weights of jobs, and what they want of origins, known on all nodes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from cachefs_cluster.directory.job_shares import SharedJobShares
from cachefs_cluster.sharing.sections import ORIGIN_USES, PRIORITIES
from cachefs_daemon.datasets.stamps import ChangeStamp
from cachefs_daemon.fetch.origin_shares import OriginUse
from cachefs_daemon.jobs.job_files import NO_PRIORITY, JobPriority
from cachefs_daemon.jobs.states import JobState
from tests import virtual_time
from tests.sharing import SharingNode, sharing_nodes


class Jobs:
    """As much of a registry as the weights of jobs need."""

    def __init__(self, *running: str) -> None:
        self.jobs = {name: SimpleNamespace(name=name, state=JobState.RUNNING, priority=NO_PRIORITY) for name in running}
        self.weights: dict[str, float] = {}

    def __iter__(self) -> Any:
        return iter(self.jobs.values())

    def set_priority(self, name: str, priority: JobPriority) -> None:
        self.jobs[name].priority = priority
        self.weights[name] = priority.weight


class Peer:
    def __init__(self, node: SharingNode, *running: str) -> None:
        self.node, self.jobs = node, Jobs(*running)
        self.shares = SimpleNamespace(local_uses={}, remote_uses={})
        self.shares.take_remote_uses = partial(setattr, self.shares, "remote_uses")
        self.sharing = SharedJobShares(self.jobs, self.shares, node.shared)  # type: ignore[arg-type]

    async def step(self) -> None:
        self.sharing.share_weights()
        self.sharing.publish_uses()
        await virtual_time.settle()
        self.sharing.take_uses()


async def exchange(*peers: Peer) -> None:
    for _ in range(4):
        for peer in peers:
            await peer.step()


def test_a_weight_holds_on_all_nodes_the_latest_one_and_as_long_as_the_job_runs_anywhere() -> None:
    async def scenario() -> None:
        async with sharing_nodes(3) as nodes:
            one, two, home = Peer(nodes[0], "job"), Peer(nodes[1], "job"), Peer(nodes[2])
            one.jobs.set_priority("job", JobPriority(2.0, ChangeStamp(1, nonce=5)))
            await exchange(one, two, home)
            assert [peer.jobs.weights for peer in (one, two, home)] == [{"job": 2.0}] * 3
            # Set on two nodes at once: all choose the same one.
            one.jobs.set_priority("job", JobPriority(3.0, ChangeStamp(2, nonce=7)))
            two.jobs.set_priority("job", JobPriority(4.0, ChangeStamp(2, nonce=9)))
            await exchange(one, two, home)
            assert [peer.jobs.weights for peer in (one, two, home)] == [{"job": 4.0}] * 3
            del two.jobs.jobs["job"], two.jobs.weights["job"]  # it has ended there
            await exchange(one, two, home)
            assert [peer.jobs.weights for peer in (one, two, home)] == [{"job": 4.0}] * 3
            del one.jobs.jobs["job"], one.jobs.weights["job"]
            await exchange(one, two, home)
            assert [peer.jobs.weights for peer in (one, two, home)] == [{}] * 3
            assert not any(peer.node.shared.published_names(PRIORITIES) for peer in (one, two, home))

    virtual_time.run(scenario())


def test_what_a_job_wants_through_one_node_is_known_on_the_others_and_sent_again_only_where_it_changes() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as nodes:
            one, two = Peer(nodes[0]), Peer(nodes[1])
            one.shares.local_uses = {"store": {"job": OriginUse(1000.0, 500.0, 1.0), "": OriginUse(7.0, 7.0, 0.0)}}
            await exchange(one, two)
            assert two.shares.remote_uses == {nodes[0].record.id: {"store": {"job": OriginUse(1000.0, 500.0, 1.0)}}}
            one.shares.local_uses = {"store": {"job": OriginUse(1010.0, 490.0, 1.0)}}
            await exchange(one, two)
            assert two.shares.remote_uses[nodes[0].record.id]["store"]["job"].wants == 1000.0
            one.shares.local_uses = {}
            await exchange(one, two)
            assert two.shares.remote_uses == {}
            assert one.node.shared.published_names(ORIGIN_USES) == []

    virtual_time.run(scenario())
