"""Which group leads, and what is announced, as consumers come, read on and go."""

from dataclasses import dataclass, field, replace

from cachefs.planning.cluster.schedule import Announcement
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_cluster.placement.coordinator import NOTICE, Coordinator
from cachefs_cluster.placement.groups import ConsumerGroup, GroupMember
from cachefs_cluster.placement.snapshot_context import EpochPosition
from cachefs_cluster.sharing.sections import ANNOUNCEMENTS, ConsumerFacts, OrderRef, SharedAnnouncement

SNAPSHOT = "a" * 32


def group(
    job: str, nodes: str = "abcd", seed: int = 0, epochs: int = 9, loader: str = "", size: int = 100
) -> ConsumerGroup:
    """A group with a rank on each node."""
    spec = SamplerSpec(kind="torch-distributed", size=size, seed=seed, epochs=epochs, replicas=len(nodes))
    members = [
        GroupMember(
            node, ConsumerFacts(job, f"{rank}{loader}", "ds", SNAPSHOT, rank, len(nodes), replace(spec, rank=rank))
        )
        for rank, node in enumerate(nodes)
    ]
    return ConsumerGroup(job, SNAPSHOT, loader, spec, tuple(members))


@dataclass
class Scene:
    """What the nodes know of the progress of all groups: epochs, by name of the group."""

    groups: list[ConsumerGroup]
    progress: dict[str, float] = field(default_factory=dict)
    rate: float = 0.01

    def positions_of(self, group: ConsumerGroup) -> list[EpochPosition]:
        if group.name not in self.progress:
            return []
        epoch, done = divmod(self.progress[group.name], 1.0)
        return [EpochPosition(member.node, int(epoch), done, self.rate) for member in group.members]

    def slowest(self, group: ConsumerGroup) -> EpochPosition:
        return min(self.positions_of(group), key=lambda at: at[1:3], default=EpochPosition("", 0, 0.0, 0.0))

    def coordinator(self, me: str) -> Coordinator:
        return Coordinator(me, self.positions_of, self.slowest, lambda: 2.0)

    def step(self, one: Coordinator, eligible: list[ConsumerGroup] | None = None) -> bool:
        sizes = {group.digest: 100 if not group.loader else 5 for group in self.groups}
        return one.issue(self.groups, self.groups if eligible is None else eligible, sizes)


def numbers(announcement: Announcement) -> list[int]:
    return [schedule.number for schedule in announcement.schedules]


def test_the_first_node_with_a_consumer_announces_and_the_others_follow() -> None:
    scene = Scene([group("job", "bcd")])
    issuer, other = scene.coordinator("b"), scene.coordinator("c")
    assert not scene.step(other)
    assert not scene.step(scene.coordinator("a")), "it has no consumer"
    assert scene.step(issuer)
    announced = issuer.announcement
    assert (announced.serial, announced.issuer, announced.term, announced.leader) == (1, "b", 1, "job")
    assert numbers(announced) == [0, 1]
    assert [schedule.since for schedule in announced.schedules] == [0.0, 0.0]
    assert not scene.step(issuer), "nothing is new"
    assert other.follow(announced)
    assert not other.follow(announced)
    assert other.find_leader(scene.groups) is scene.groups[0]


def test_each_epoch_is_announced_before_it_begins() -> None:
    scene = Scene([group("job", epochs=3)])
    issuer = scene.coordinator("a")
    scene.step(issuer)
    scene.progress["job"] = 1.02
    assert scene.step(issuer)
    assert numbers(issuer.announcement) == [1, 2]
    assert issuer.announcement.term == 1
    scene.progress["job"] = 2.5
    assert scene.step(issuer)
    assert numbers(issuer.announcement) == [2], "the last one"


def test_a_second_job_takes_part_from_a_little_later_on() -> None:
    first, second = group("job"), group("other", "ab", seed=1000)
    scene = Scene([first], {"job": 0.3})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    scene.groups.append(second)
    assert scene.step(issuer)
    now, following = issuer.announcement.schedules
    assert [one.group for one in now.groups] == [first.digest, second.digest]
    assert now.since == 0.3 + NOTICE + 2.0 * 0.01
    assert following.since == 0.0
    assert issuer.announcement.leader == "job"
    scene.groups.remove(second)
    assert scene.step(issuer)
    assert [len(schedule.groups) for schedule in issuer.announcement.schedules] == [1, 1]


def test_groups_that_drift_apart_are_timed_anew() -> None:
    scene = Scene([group("job"), group("other", seed=1000)], {"job": 0.2, "other": 0.2})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    scene.progress |= {"job": 0.5, "other": 0.45}
    assert not scene.step(issuer), "by a twentieth of an epoch"
    scene.progress |= {"job": 0.6, "other": 0.35}
    assert scene.step(issuer)
    [own, other] = issuer.announcement.schedules[0].groups
    assert abs(own.begin) < 1e-9
    assert other.begin > 0.2


def test_when_the_leader_ends_another_group_leads_from_where_copies_are() -> None:
    scene = Scene([group("job"), group("other", "bc", seed=1000)], {"job": 3.5, "other": 1.25})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    assert issuer.announcement.leader == "job", "it has more consumers"
    successor = scene.coordinator("b")
    successor.follow(issuer.announcement)
    assert not scene.step(successor)
    scene.groups.pop(0)
    del scene.progress["job"]
    assert not scene.step(issuer), "it has no consumer any more"
    assert scene.step(successor)
    announced = successor.announcement
    assert (announced.serial, announced.term, announced.leader, announced.first_epoch) == (2, 2, "other", 1)
    assert announced.left_at == 3.5 + 2.0 * 0.01
    scene.groups.clear()
    assert not scene.step(successor), "the copies are looked for where they are"


def test_a_leader_that_goes_back_to_earlier_epochs_begins_another_term() -> None:
    scene = Scene([group("job")], {"job": 5.5})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    scene.progress["job"] = 3.0
    assert scene.step(issuer)
    assert (issuer.announcement.term, issuer.announcement.first_epoch) == (2, 3)
    assert issuer.announcement.left_at == 5.5 + 2.0 * 0.01
    assert numbers(issuer.announcement) == [3, 4]


def test_a_group_whose_ranks_turn_to_another_sampler_goes_on_with_its_epochs() -> None:
    scene = Scene([group("job")], {"job": 2.5})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    scene.groups[:] = [group("job", seed=7)]
    assert scene.step(issuer)
    assert (issuer.announcement.term, issuer.announcement.serial) == (1, 2)
    assert issuer.announcement.schedules[0].groups[0].group == scene.groups[0].digest


def test_without_groups_whose_reads_may_decide_none_leads() -> None:
    scene = Scene([group("job")], {"job": 2.5})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    assert scene.step(issuer, eligible=[])
    assert (issuer.announcement.leader, issuer.announcement.term) == ("", 2)
    assert not scene.step(issuer, eligible=[])


def test_orders_that_are_published_one_by_one_are_announced_once_the_next_is_known() -> None:
    def publishing(*epochs: int) -> ConsumerGroup:
        orders = [OrderRef(epoch, f"{epoch:032x}", 25) for epoch in epochs]
        members = [
            GroupMember(node, ConsumerFacts("job", str(rank), "ds", SNAPSHOT, rank, 2, None, orders))
            for rank, node in enumerate("ab")
        ]
        return ConsumerGroup("job", SNAPSHOT, "", None, tuple(members))

    scene = Scene([publishing(0)], {"job": 0.02})
    issuer = scene.coordinator("a")
    assert scene.step(issuer)
    assert numbers(issuer.announcement) == []
    scene.groups[:] = [publishing(0, 1)]
    assert scene.step(issuer)
    [schedule] = issuer.announcement.schedules
    assert (schedule.number, schedule.since, schedule.groups[0].known) == (0, 0.02 + NOTICE, 2)


def test_after_a_change_of_the_leader_groups_are_timed_by_the_new_one_alone() -> None:
    leader, other, third = group("job"), group("other", "bc", seed=1, epochs=1000), group("third", "ab", seed=2)
    scene = Scene([leader, other, third], {"job": 1.5, "other": 900.5, "third": 1.5})
    issuer = scene.coordinator("a")
    scene.step(issuer)
    assert issuer.announcement.leader == "job"
    scene.groups.remove(leader)
    scene.progress = {"other": 901.5, "third": 2.5}
    scene.step(issuer)
    assert issuer.announcement.leader == "other"
    [_, timing] = issuer.announcement.schedules[0].groups
    assert timing.interval == 1.0, "its epochs last as long as the leader's"


def test_an_announcement_is_valid_whatever_rates_nodes_publish() -> None:
    scene = Scene([group("job"), group("other", "bc", seed=1)], {"job": 1.5, "other": 1.5}, rate=1e308)
    issuer = scene.coordinator("a")
    scene.step(issuer)
    scene.groups.pop(0)
    scene.step(issuer := _taken_over_by(scene, issuer, "b"))
    assert issuer.announcement.leader == "other"
    value = SharedAnnouncement(replace(issuer.announcement, issuer="b" * 16))
    assert ANNOUNCEMENTS.decode(SNAPSHOT, ANNOUNCEMENTS.encode(value)) == value


def _taken_over_by(scene: Scene, before: Coordinator, node: str) -> Coordinator:
    """Return the coordinator of another node that has followed everything so far."""
    found = scene.coordinator(node)
    found.follow(before.announcement)
    scene.groups.append(first := group("job"))
    scene.step(found)
    scene.groups.remove(first)
    return found


def test_whether_the_snapshot_is_hot_is_announced_once_and_passed_on() -> None:
    scene = Scene([group("job")])
    issuer, other = scene.coordinator("a"), scene.coordinator("b")

    def issue(one: Coordinator, block_reads: float | None) -> bool:
        return one.issue(scene.groups, scene.groups, {scene.groups[0].digest: 100}, block_reads)

    issue(issuer, None)
    assert not issuer.announcement.is_hot
    before = issuer.announcement
    assert issue(issuer, 1.0)
    assert (issuer.announcement.is_hot, issuer.announcement.term) == (True, before.term)
    assert not issue(issuer, 0.3 / 3600), "less, but not by enough"
    assert not issue(issuer, None), "its readers pause"
    assert other.follow(issuer.announcement)
    scene.groups = [group("job", "bcd")]
    issue(other, None)
    assert other.announcement.is_hot, "the next issuer goes on from there"
    assert issue(other, 0.1 / 3600)
    assert not other.announcement.is_hot


def test_a_snapshot_whose_jobs_do_not_decide_may_be_hot() -> None:
    scene = Scene([group("job")])
    issuer = scene.coordinator("a")
    assert issuer.issue(scene.groups, [], {}, 1.0)
    assert (issuer.announcement.leader, issuer.announcement.is_hot) == ("", True)
