"""Which consumers read together."""

from dataclasses import replace

from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_cluster.placement.groups import ConsumerGroup, groups_of
from cachefs_cluster.sharing.sections import ConsumerFacts, OrderRef

SPEC = SamplerSpec(kind="torch-distributed", size=100, epochs=3, replicas=3)


def rank(number: int, job: str = "train", snapshot: str = "a" * 32, spec: SamplerSpec = SPEC) -> ConsumerFacts:
    return ConsumerFacts(job, f"rank{number}", "ds", snapshot, number, 3, replace(spec, rank=number))


def one_group(*nodes: tuple[str, list[ConsumerFacts]]) -> ConsumerGroup:
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


def orders(consumer: str, number: int = 0, ranks: int = 1, **more: object) -> ConsumerFacts:
    """A consumer that publishes its orders one by one."""
    return ConsumerFacts("train", consumer, "ds", "a" * 32, number, ranks, **more)  # type: ignore[arg-type]


def test_consumers_that_read_everything_share_nothing_out() -> None:
    everything = SamplerSpec(kind="numpy", size=100, epochs=3)
    facts = [ConsumerFacts("train", name, "ds", "a" * 32, spec=everything) for name in ("x", "y")]
    assert not one_group(("a", [facts[0]]), ("b", [facts[1]])).is_whole
    assert one_group(("a", [facts[0]])).is_whole, "a single reader reads all of it alone"


def test_a_rank_that_counts_more_epochs_since_it_began_later_is_of_the_same_group() -> None:
    later = replace(SPEC, epochs=SPEC.epochs + 2)
    group = one_group(("a", [rank(0), rank(1, spec=later)]), ("b", [rank(2)]))
    assert group.is_whole
    assert group.spec == SPEC


def test_orders_that_are_published_one_by_one_are_whole_with_all_ranks_once_whatever_their_maps() -> None:
    facts = [orders(str(number), number, 3, map=digit * 32, map_size=9) for number, digit in enumerate("dcd")]
    group = one_group(("a", facts[:2]), ("b", facts[2:]))
    assert group.spec is None
    assert group.is_whole
    assert group.maps == ("c" * 32, "d" * 32)
    assert not one_group(("a", facts[:2])).is_whole
    assert not one_group(("a", facts), ("b", [orders("twice", 2, 3)])).is_whole
    assert not one_group(("a", [facts[0], facts[1]]), ("b", [orders("2", 2, 4)])).is_whole, "of how many?"
    explicit = SamplerSpec(kind="explicit", size=100)
    assert one_group(("a", [orders("0", 0, 2, spec=explicit)]), ("b", [orders("1", 1, 2)])).is_whole


def test_another_loader_of_the_same_ranks_is_another_group() -> None:
    names = ["0", "1", "0.1", "1.1", "0+1", "1+1", "10.1"]
    facts = [orders(name, int(name[0]), 2) for name in names[:-1]]
    groups = groups_of({"a": facts[::2], "b": [*facts[1::2], orders("10.1", 10, 11)]})
    assert [(group.loader, len(group.members)) for group in groups] == [("", 2), ("+1", 2), (".1", 3)]
    assert groups[0].is_whole
    assert not groups[2].is_whole
    assert len({group.name for group in groups}) == 3
    lone = groups_of({"a": [orders("pid-12"), orders("pid-12.1")]})
    assert [group.is_whole for group in lone] == [True, True], "processes without ranks"


def test_a_name_is_as_long_as_others_take_it() -> None:
    assert len(one_group(("a", [orders("0" + "x" * 255)])).name) <= 160


def test_who_reads_stays_the_same_while_orders_come_and_go() -> None:
    before, after = (one_group(("a", [orders("0", orders=refs)])) for refs in ([], [OrderRef(3, "b" * 32, 5)]))
    assert before != after
    assert before.reader_ids == after.reader_ids
