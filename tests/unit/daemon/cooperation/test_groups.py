"""Which consumers read together."""

from dataclasses import replace

from cachefs_daemon.cooperation.groups import Group, groups_of
from cachefs_daemon.sharing.sections import ConsumerFacts

from cachefs.planning.sequences.sampler_spec import SamplerSpec

SPEC = SamplerSpec(kind="torch-distributed", size=100, epochs=3, replicas=3)


def rank(number: int, job: str = "train", snapshot: str = "a" * 32, spec: SamplerSpec = SPEC) -> ConsumerFacts:
    return ConsumerFacts(job, f"rank{number}", "ds", snapshot, number, 3, replace(spec, rank=number))


def one_group(*nodes: tuple[str, list[ConsumerFacts]]) -> Group:
    [group] = groups_of(dict(nodes))
    return group


def test_ranks_of_one_sampler_are_a_group_in_the_order_of_ranks() -> None:
    group = one_group(("b", [rank(0), rank(2)]), ("a", [rank(1)]))
    assert [(member.node, member.facts.rank) for member in group.members] == [("b", 0), ("a", 1), ("b", 2)]
    assert group.is_whole
    assert group.nodes == {"a", "b"}


def test_a_group_without_one_of_its_ranks_or_with_one_twice_is_not_whole() -> None:
    assert not one_group(("a", [rank(0)]), ("b", [rank(1)])).is_whole
    assert not one_group(("a", [rank(0), rank(1)]), ("b", [rank(1), rank(2)])).is_whole


def test_a_group_of_billions_of_ranks_costs_nothing() -> None:
    spec = replace(SPEC, replicas=2**32 - 1)
    assert not one_group(("a", [rank(0, spec=spec)])).is_whole


def test_it_is_the_same_group_while_ranks_come_and_go() -> None:
    assert one_group(("a", [rank(0)])).key == one_group(("b", [rank(1), rank(2)])).key


def test_other_jobs_snapshots_maps_and_samplers_are_other_groups() -> None:
    others = [
        rank(0, job="other"),
        rank(0, snapshot="b" * 32),
        rank(0, spec=replace(SPEC, seed=1)),
        ConsumerFacts("train", "mapped", "ds", "a" * 32, 0, 3, SPEC, map="c" * 32, map_size=9),
    ]
    assert len(groups_of({"a": [rank(0), *others]})) == 5


def test_consumers_that_read_everything_share_nothing_out() -> None:
    everything = SamplerSpec(kind="numpy", size=100, epochs=3)
    facts = [ConsumerFacts("train", name, "ds", "a" * 32, spec=everything) for name in ("x", "y")]
    assert not one_group(("a", [facts[0]]), ("b", [facts[1]])).is_whole
    assert one_group(("a", [facts[0]])).is_whole, "a single reader reads all of it alone"


def test_orders_that_are_published_one_by_one_are_a_group_that_is_never_whole() -> None:
    spec = SamplerSpec(kind="explicit", size=100)
    facts = [ConsumerFacts("train", name, "ds", "a" * 32, spec=one) for name, one in (("x", spec), ("y", None))]
    group = one_group(("a", [facts[0]]), ("b", [facts[1]]))
    assert group.spec is None
    assert not group.is_whole
