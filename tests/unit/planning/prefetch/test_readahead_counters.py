"""What was guessed, by snapshot and rule."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch.readahead_budget import MAX_SNAPSHOTS, ReadaheadCounters, ReadaheadRule, RuleCounts


def test_each_snapshot_and_rule_has_its_own_counts_and_the_last_one_comes_first() -> None:
    book = ReadaheadCounters()
    book.note_fetched("a", ReadaheadRule.SET, 10)
    book.note_fetched("b", ReadaheadRule.REST, 7)
    book.note_right("b", ReadaheadRule.REST, 7)
    book.note_fetched("a", ReadaheadRule.LISTING, 5)
    book.note_wrong("a", ReadaheadRule.LISTING, 5)
    assert [(snapshot, rule) for snapshot, rule, _ in book.rows()] == [
        ("a", ReadaheadRule.SET), ("a", ReadaheadRule.LISTING), ("b", ReadaheadRule.REST)
    ]  # fmt: skip
    assert book.total == RuleCounts(blocks=3, right=1, wrong=1, bytes=22, right_bytes=7, wrong_bytes=5)
    book.note_undone("a", ReadaheadRule.SET, 10)
    assert book.total.unread_bytes == 5


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(ReadaheadRule), st.integers(1, 100)), max_size=600))
def test_the_sum_is_that_of_the_rows_and_rows_are_bounded(guesses: list[tuple[int, ReadaheadRule, int]]) -> None:
    book = ReadaheadCounters()
    for snapshot, rule, size in guesses:
        book.note_fetched(f"snapshot-{snapshot}", rule, size)
    rows = list(book.rows())
    assert len({snapshot for snapshot, _, _ in rows}) <= MAX_SNAPSHOTS
    assert sum(counts.bytes for _, _, counts in rows) <= book.total.bytes
    if len({snapshot for snapshot, _, _ in guesses}) <= MAX_SNAPSHOTS:
        assert sum(counts.bytes for _, _, counts in rows) == book.total.bytes
