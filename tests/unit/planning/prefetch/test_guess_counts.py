"""What was guessed, by snapshot and rule."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch.guess_counts import MOST_SNAPSHOTS, GuessBook, Guesses, Rule


def test_each_snapshot_and_rule_has_its_own_counts_and_the_last_one_comes_first() -> None:
    book = GuessBook()
    book.guessed("a", Rule.SET, 10)
    book.guessed("b", Rule.REST, 7)
    book.right("b", Rule.REST, 7)
    book.guessed("a", Rule.LISTING, 5)
    book.wrong("a", Rule.LISTING, 5)
    assert [(snapshot, rule) for snapshot, rule, _ in book.rows()] == [
        ("a", Rule.SET), ("a", Rule.LISTING), ("b", Rule.REST)
    ]  # fmt: skip
    assert book.total == Guesses(blocks=3, right=1, wrong=1, bytes=22, right_bytes=7, wrong_bytes=5)
    book.undone("a", Rule.SET, 10)
    assert book.total.unread_bytes == 5


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(Rule), st.integers(1, 100)), max_size=600))
def test_the_sum_is_that_of_the_rows_and_rows_are_bounded(guesses: list[tuple[int, Rule, int]]) -> None:
    book = GuessBook()
    for snapshot, rule, size in guesses:
        book.guessed(f"snapshot-{snapshot}", rule, size)
    rows = list(book.rows())
    assert len({snapshot for snapshot, _, _ in rows}) <= MOST_SNAPSHOTS
    assert sum(counts.bytes for _, _, counts in rows) <= book.total.bytes
    if len({snapshot for snapshot, _, _ in guesses}) <= MOST_SNAPSHOTS:
        assert sum(counts.bytes for _, _, counts in rows) == book.total.bytes
