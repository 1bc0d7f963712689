from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cachefs_scheduler.slurm.hint_file import MIN_SHARE, SOME, TOPS, HolderLevels, damped_share, divide_holders

NODES = [f"n{number}" for number in range(40)]
PARTS = st.dictionaries(st.sampled_from(NODES), st.floats(0, 1), max_size=40)
PARTITIONS = st.lists(st.frozensets(st.sampled_from(NODES), min_size=1), max_size=4)


def test_nodes_that_hold_as_much_have_the_same_levels() -> None:
    levels = divide_holders({"a": 1.0, "b": 0.98, "c": 0.5, "d": 0.02}, [["a", "b", "c", "d", "e"]])
    assert levels.nested == {"top1": {"a", "b"}, SOME: {"a", "b", "c"}}
    assert levels.full == {"a", "b"}
    assert list(levels.levels_of_node("a")) == ["top1", SOME, "full"]
    assert levels.counts(None) == (("top1", 2), (SOME, 3))
    assert levels.counts(["b", "c", "e"]) == (("top1", 1), (SOME, 2))


def test_a_dataset_that_is_spread_thinly_is_somewhere() -> None:
    levels = divide_holders(dict.fromkeys(NODES[:20], 0.05), [NODES])
    assert levels.nested == {SOME: frozenset(NODES[:20])}


def test_nothing_cached_is_no_level() -> None:
    assert divide_holders({"a": MIN_SHARE / 2}, [["a"]]) == HolderLevels({}, frozenset())


def test_each_partition_has_its_best_nodes() -> None:
    parts = {"a": 1.0, "b": 0.9, "x": 0.3, "y": 0.2}
    assert divide_holders(parts, [["a", "b"], ["x", "y"]]).nested["top1"] == {"a", "x"}


@given(PARTS, PARTITIONS)
def test_levels_are_within_each_other_and_large_enough(
    parts: dict[str, float], partitions: list[frozenset[str]]
) -> None:
    levels = divide_holders(parts, partitions)
    sets = list(levels.nested.values())
    assert all(one < other for one, other in pairwise(sets))
    some = levels.nested.get(SOME, frozenset())
    for count in TOPS:
        if f"top{count}" in levels.nested:
            for within in partitions:
                assert len(levels.nested[f"top{count}"] & within) >= min(count, len(some & within))


@given(st.lists(st.floats(0, 1), min_size=1))
def test_the_value_that_counts_is_never_far_from_the_truth(values: list[float]) -> None:
    kept = 0.0
    for value in values:
        kept = damped_share(kept, value)
        assert abs(kept - value) < 0.05
        assert (kept < MIN_SHARE) == (value < MIN_SHARE)
