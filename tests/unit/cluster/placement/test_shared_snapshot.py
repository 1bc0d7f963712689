"""Copies go where they are read next: whole epochs of a simulated cluster, on a clock of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cachefs.planning.cluster import copies
from cachefs_cluster.placement.groups import groups_of
from cachefs_cluster.sharing.sections import ConsumerFacts, OrderRef
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.simulated_cluster import SNAPSHOT, Setting, SimulatedCluster, SimulatedJob, simulated


def origin_reads(cluster: SimulatedCluster) -> float:
    """Of all blocks of the dataset."""
    return sum(epoch.from_origin for epoch in cluster.figures) / cluster.setting.files


def test_blocks_leave_the_origin_once_and_reads_become_local() -> None:
    cluster = simulated(Setting(capacity=1.1))
    assert origin_reads(cluster) <= 1.01
    for epoch in cluster.figures[1:]:
        assert epoch.local > 0.42, "0.25 if blocks stayed at home"
        assert epoch.from_origin <= 0.01 * epoch.reads
    assert sum(epoch.late for epoch in cluster.figures) <= 0.001 * 4 * cluster.setting.files


def test_a_rank_that_is_ahead_of_the_others_costs_hardly_anything() -> None:
    cluster = simulated(Setting(capacity=1.1, drift=20))
    assert origin_reads(cluster) <= 1.01
    assert all(epoch.local > 0.42 for epoch in cluster.figures[1:])


def test_caches_for_half_of_it_together_fetch_little_more_than_they_must() -> None:
    setting = Setting(nodes=2, files=1000, capacity=0.5, rate=25.0)
    cluster = simulated(setting)
    # What is fetched just before it is read takes the place of other blocks: 1/30 of an epoch's.
    assert origin_reads(cluster) <= 1.03 * (1 + (setting.epochs - 1) * 0.5)


def test_all_nodes_agree_who_holds_what() -> None:
    cluster = simulated(Setting(nodes=3, files=300, capacity=1.2))
    first, *others = cluster.remembered.values()
    assert others
    for other in others:
        assert (other.job, other.epoch, other.count, other.ids) == (first.job, first.epoch, first.count, first.ids)
        assert (other.holders == first.holders).all()


def test_orders_that_are_published_as_epochs_begin_are_coordinated_though_some_nodes_know_them_late() -> None:
    cluster = simulated(Setting(capacity=1.1, ahead=1, told=(0.1, 1.0)))
    assert origin_reads(cluster) <= 1.01
    for epoch in cluster.figures[1:]:
        assert epoch.local > 0.38, "0.25 if blocks stayed at home; with one epoch known ahead 0.4 in the end"
    first, *others = cluster.remembered.values()
    for other in others:
        assert (other.epoch, other.count) == (first.epoch, first.count)
        assert (other.holders == first.holders).all()


def test_a_job_that_reads_each_epoch_as_the_first_one_reads_here_from_then_on() -> None:
    cluster = simulated(Setting(capacity=1.1, epochs=2, ahead=1, told=(0.1, 0.3), repeats=True))
    assert origin_reads(cluster) <= 1.05
    assert cluster.figures[1].local > 0.9


def test_orders_that_come_late_in_an_epoch_cost_no_more_than_blocks_at_home() -> None:
    cluster = simulated(Setting(capacity=1.1, epochs=2, ahead=1, told=(3.0, 4.0)))
    assert origin_reads(cluster) <= 1.07, "as if blocks stayed at home: nodes do not know in time what is read there"
    assert not cluster.disagreements


def test_a_node_that_is_lost_costs_its_share_and_no_more() -> None:
    # The others have room for all of it.
    cluster = simulated(Setting(capacity=1.5, loss=9.0))
    again = sum(epoch.again for epoch in cluster.figures) / cluster.setting.files
    assert 0.1 <= again <= 0.25 + 0.02


def test_a_hot_snapshot_survives_the_loss_of_a_node_without_a_read_of_the_origin() -> None:
    cluster = simulated(Setting(capacity=3.0, loss=9.0, replicas=2))
    assert sum(epoch.again for epoch in cluster.figures) == 0
    assert origin_reads(cluster) == 1.0
    assert not cluster.disagreements


def test_a_snapshot_that_is_read_seldom_has_no_second_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "AWAY_SECONDS", 1.0)
    cluster = simulated(Setting(capacity=3.0, loss=9.0, replicas=2))
    assert not sum(node.second_copies for node in cluster.nodes)
    again = sum(epoch.again for epoch in cluster.figures) / cluster.setting.files
    assert 0.08 <= again <= 0.25 + 0.02, "what the lost node held and nobody had read"


@pytest.mark.parametrize("capacity", [1.1, 1.5])
def test_second_copies_displace_no_first_copies(capacity: float) -> None:
    one, two = (simulated(Setting(capacity=capacity, replicas=replicas)) for replicas in (1, 2))
    assert two.origin_reads == one.origin_reads
    made = sum(node.second_copies for node in two.nodes) / two.setting.files
    assert made >= 0.4 if capacity > 1.2 else made <= 0.2, "as many as there is room for, each made about once"
    assert all(epoch.local > 0.42 for epoch in two.figures[1:])


# --- several jobs -----------------------------------------------------------------------------------------------------

ALL = (0, 1, 2, 3)


def local_shares(cluster: SimulatedCluster, job: str, since: int = 1) -> float:
    """Of the reads of a job from that epoch on."""
    epochs = cluster.figures_by_epoch(job)[since:]
    return 1 - sum(one.from_peers + one.from_origin for one in epochs) / sum(one.reads for one in epochs)


def test_two_jobs_on_one_dataset_read_as_much_locally_as_one_and_fetch_each_block_once() -> None:
    other = SimulatedJob("other", ALL, seed=1000, rate=25)
    cluster = simulated(Setting(capacity=1.1, rate=25, jobs=(other,)))
    assert cluster.origin_reads <= 1.01 * cluster.setting.files
    assert min(local_shares(cluster, "job"), local_shares(cluster, "other")) > 0.44, "0.25 if blocks stayed at home"
    assert not cluster.disagreements


def test_a_job_of_another_pace_on_other_nodes_takes_part() -> None:
    half = SimulatedJob("half", (1, 3), seed=1000, rate=25)
    slow = SimulatedJob("slow", ALL, seed=2000, rate=10, epochs=2)
    cluster = simulated(Setting(capacity=1.1, rate=25, jobs=(half, slow), epochs=4))
    assert cluster.origin_reads <= 1.01 * cluster.setting.files
    assert min(local_shares(cluster, job) for job in ("job", "half", "slow")) > 0.38
    assert not cluster.disagreements


def test_copies_stay_where_they_are_when_a_job_comes_or_is_killed() -> None:
    """The first job leads, and then the one that is left."""
    late = SimulatedJob("late", ALL, seed=1000, rate=25, start=18, epochs=3)
    killed = SimulatedJob("killed", ALL, seed=2000, rate=25, end=40, epochs=9)
    cluster = simulated(Setting(capacity=1.1, rate=25, jobs=(late, killed)))
    assert cluster.origin_reads <= 1.03 * cluster.setting.files
    assert local_shares(cluster, "late") > 0.38
    assert not cluster.disagreements


def test_all_nodes_agree_where_a_home_has_more_than_fits() -> None:
    cluster = simulated(Setting(nodes=8, files=600, capacity=1.1, epochs=1, rate=3.75, tick=0.5))
    assert not cluster.disagreements


def test_a_job_that_is_killed_and_goes_on_from_a_checkpoint_finds_its_copies() -> None:
    killed = SimulatedJob("killed", ALL, seed=1000, rate=7.5, end=30)
    again = replace(killed, start=34, end=0.0, resumes=1, resumes_at=0.4)
    cluster = simulated(Setting(files=600, rate=7.5, tick=0.25, jobs=(killed, again)))
    assert cluster.origin_reads <= 1.05 * cluster.setting.files
    assert [epoch.reads for epoch in cluster.figures_by_epoch("killed")][2] == 600
    assert not cluster.disagreements


def test_a_validation_loader_takes_part_beside_the_training() -> None:
    training = SimulatedJob("job", ALL, seed=0, rate=7.5, paces=((20, 0.0), (24, 1.0), (44, 0.0), (48, 1.0)))
    paces = ((0, 0.0), (20, 1.0), (24, 0.0), (44, 1.0), (48, 0.0), (68, 1.0))
    validation = replace(training, seed=1, rate=2.0, paces=paces, loader="val", share=0.05)
    cluster = simulated(Setting(files=600, rate=7.5, tick=0.25, jobs=(replace(training, name="other"), validation)))
    assert [epoch.reads for epoch in cluster.figures_by_epoch("jobval")] == [32] * 3
    assert cluster.origin_reads <= 1.08 * cluster.setting.files, "more than without: 1.01"
    assert not cluster.disagreements


def test_a_node_that_comes_back_agrees_with_the_others() -> None:
    cluster = simulated(Setting(files=600, capacity=1.5, rate=7.5, tick=0.25, loss=25, back=35))
    assert sum(epoch.again for epoch in cluster.figures) <= 0.27 * cluster.setting.files
    assert not cluster.disagreements


def test_larger_nodes_hold_more() -> None:
    cluster = simulated(Setting(files=600, rate=7.5, tick=0.25, epochs=2, caches=(1.0, 1.0, 1.0, 2.0)))
    assert cluster.origin_reads <= 1.02 * cluster.setting.files
    small, *_, large = (len(node.tier.sizes) for node in cluster.nodes)
    assert large > 1.5 * small


def test_a_job_that_resumes_in_a_late_epoch_takes_part() -> None:
    resumed = SimulatedJob("resumed", ALL, seed=1000, rate=25, start=5, epochs=43, resumes=40)
    cluster = simulated(Setting(capacity=1.1, rate=25, jobs=(resumed,)))
    assert cluster.origin_reads <= 1.01 * cluster.setting.files
    assert local_shares(cluster, "resumed") > 0.40
    assert not cluster.disagreements


def test_jobs_that_publish_their_orders_as_epochs_begin_take_part() -> None:
    other = SimulatedJob("other", ALL, seed=1000, rate=25)
    cluster = simulated(Setting(capacity=1.1, rate=25, ahead=1, told=(0.1, 1.0), jobs=(other,)))
    assert cluster.origin_reads <= 1.01 * cluster.setting.files
    assert min(local_shares(cluster, "job"), local_shares(cluster, "other")) > 0.36
    assert not cluster.disagreements


# --- while consumers come and go --------------------------------------------------------------------------------------


def test_what_is_kept_for_others_counts_while_ranks_change_their_sampler_one_after_the_other() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        node = cluster.nodes[0]
        await cluster._settle()
        [key] = node.shared.remote_read_keys
        kept = node.plan.next_use_of(SNAPSHOT, np.flatnonzero(node.standing.owned[SNAPSHOT])).copy()
        assert np.isfinite(kept).all()
        facts = node.facts
        for rank in range(4):
            for orders in (False, True):
                facts = {**facts, cluster.names[rank]: [explicit(cluster, rank, orders=orders)]}
                node.shared.set_groups(groups_of(facts))
                node.shared.follow_readers()
                await cluster._settle()
                mine = np.flatnonzero(node.standing.owned[SNAPSHOT])
                left = node.plan.next_use_of(SNAPSHOT, mine)
                assert np.isfinite(left).mean() > 0.9, (rank, orders)
        [last] = node.shared.remote_read_keys
        assert last != key
        assert set(node.plan.consumers()) == {node.ranks[0].key, last}

    with_cluster(Setting(files=400), scene)


def test_room_is_taken_for_one_job_after_the_other() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        node = cluster.nodes[0]
        await cluster._settle()
        room = cluster.rooms[node.name]
        taken = room.used
        assert taken
        for number in range(5):
            facts = {name: [msgspec.structs.replace(one[0], job=f"job-{number}")] for name, one in node.facts.items()}
            node.shared.set_groups(groups_of(facts))
            await cluster._settle()
        assert room.used <= 2 * taken
        await node.shared.close()
        assert room.used == 0

    with_cluster(Setting(files=400), scene)


def test_a_node_that_has_just_started_does_not_end_what_others_coordinate() -> None:
    """It is the first one by id, and learns of the announcement before it knows which blocks jobs may read."""

    async def scene(cluster: SimulatedCluster) -> None:
        await announced(cluster)
        node, other = cluster.nodes[:2]
        before = other.shared.announcement
        assert before.leader == "job"
        await node.shared.close()
        node.shared = cluster.share(node)
        node.shared.offer_announcement(before)
        node.shared.set_groups(groups_of(node.facts))
        node.shared.follow_readers()
        assert node.shared.announcement == before
        await announced(cluster)
        assert {one.shared.announcement.term for one in cluster.nodes} == {before.term}

    with_cluster(Setting(files=400), scene)


def test_nodes_that_began_with_different_leaders_follow_the_one_that_ranks_higher() -> None:
    """Both have announced a first term before they heard of each other."""

    async def scene(cluster: SimulatedCluster) -> None:
        node = cluster.nodes[1]
        await announced(cluster)
        before = node.shared.announcement
        facts = {name: [*one, msgspec.structs.replace(one[0], job="other")] for name, one in node.facts.items()}
        node.shared.set_groups(groups_of(facts))
        other = next(group for group in groups_of(facts) if group.job == "other")
        timing = replace(before.schedules[0].groups[0], group=other.digest, readers=other.readers_digest)
        schedules = tuple(replace(one, groups=(timing,)) for one in before.schedules)
        node.shared.offer_announcement(replace(before, issuer=" ", leader="other", schedules=schedules))
        await cluster._settle()
        assert node.shared.holders is not None
        assert (node.shared.leader, node.shared.holders.leader) == ("other", "other")

    with_cluster(Setting(files=400), scene)


def test_copies_are_coordinated_though_the_samples_of_one_of_the_jobs_are_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await announced(cluster)
        node = cluster.nodes[1]
        facts = {
            name: [*one, msgspec.structs.replace(one[0], job="other", map="b" * 32)] for name, one in node.facts.items()
        }
        node.shared.set_groups(groups_of(facts))
        other = next(group for group in groups_of(facts) if group.job == "other")
        cluster.unknown_maps.add("b" * 32)
        before = node.shared.announcement
        known = before.schedules[0].groups[0]
        timing = replace(known, group=other.digest, readers=other.readers_digest, begin=0.0)
        schedules = tuple(replace(one, groups=(*one.groups, timing)) for one in before.schedules)
        node.shared.offer_announcement(replace(before, serial=before.serial + 1, schedules=schedules))
        await asyncio.sleep(1.0)
        assert "could not be updated" not in caplog.text
        assert "not known" in node.shared.problem

    with_cluster(Setting(files=400), scene)


async def announced(cluster: SimulatedCluster) -> None:
    """Let all nodes learn of what is announced, and decide by it."""
    for _ in range(2):
        await cluster._settle()
        for node in cluster.nodes:
            node.shared.follow_readers()
        for _, what in cluster._later:
            what()
        cluster._later.clear()
    await cluster._settle()


def explicit(cluster: SimulatedCluster, rank: int, *, orders: bool) -> ConsumerFacts:
    """What a rank says whose sampler has turned out to be another one."""
    ranks, samples = cluster.setting.nodes, cluster.setting.files // cluster.setting.nodes
    published = [OrderRef(epoch, f"{rank:016x}{epoch:016x}", samples) for epoch in (0, 1)] if orders else []
    return ConsumerFacts("job", str(rank), "ds", SNAPSHOT, rank, ranks, None, published)


def with_cluster(setting: Setting, scene: Callable[[SimulatedCluster], Awaitable[None]]) -> None:
    async def run() -> None:
        threads = Threads()
        try:
            cluster = SimulatedCluster(setting, threads)
            await scene(cluster)
            for node in cluster.nodes:
                await node.shared.close()
        finally:
            threads.close()

    virtual_time.run(asyncio.wait_for(run(), 60))
