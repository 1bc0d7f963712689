"""Reads and batches of a process, at times of the test's choice."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs.publishing.files.cold_reads import MAX_READS, PROMPT_NS, SETTLED_NS, BegunBatch, ReadCorrelation, TimedRead

SECOND = 1_000_000_000
THREAD = 7


def loaded(
    correlation: ReadCorrelation,
    begin: int,
    batches: list[list[int]],
    *,
    one_by_one: bool = True,
    is_prompt: bool = False,
) -> None:
    """Each batch takes a second; then the thread ends."""
    told = [
        BegunBatch((begin + place) * SECOND, 3, tuple(samples), one_by_one, is_prompt)
        for place, samples in enumerate(batches)
    ]
    correlation.add_batches(THREAD, [*told, BegunBatch((begin + len(batches)) * SECOND, None)])


def read(batch: int, name: str, after: int = 0, thread: int = THREAD) -> TimedRead:
    """A read of the batch that begins after so many seconds, some milliseconds later."""
    return TimedRead(batch * SECOND + 1_000_000 * (after + 1), thread, name)


def later(seconds: int) -> int:
    return seconds * SECOND + SETTLED_NS + 1


def test_reads_belong_to_the_batch_in_which_they_came() -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 1, [[5, 6], [8, 9]])
    correlation.add_reads([read(2, "c"), read(1, "b", 2), read(1, "a", 1)])
    [(slot, first), (_, second)] = correlation.take_settled(later(3))
    assert slot == 3
    assert (first.samples, first.paths, first.is_complete) == ((5, 6), ("a", "b"), False)
    assert (second.samples, second.paths) == ((8, 9), ("c",))
    assert correlation.take_settled(later(99)) == []


def test_a_batch_is_told_once_its_end_is_known_and_its_reads_had_time_to_come() -> None:
    correlation = ReadCorrelation()
    correlation.add_batches(THREAD, [BegunBatch(SECOND, 0, (1,))])
    correlation.add_reads([read(1, "a")])
    assert correlation.take_settled(later(50)) == []
    correlation.add_batches(THREAD, [BegunBatch(60 * SECOND, 0, (2,))])
    assert correlation.take_settled(60 * SECOND + SETTLED_NS // 2) == []
    assert len(correlation.take_settled(later(60))) == 1


def test_of_a_batch_whose_successor_is_told_at_once_reads_are_told_while_it_is_loaded() -> None:
    correlation = ReadCorrelation()
    correlation.add_batches(THREAD, [BegunBatch(SECOND, 0, (1, 2, 3), is_prompt=True)])
    correlation.add_reads([read(1, "a", 1)])
    assert correlation.take_settled(SECOND + PROMPT_NS // 2) == []
    [(_, observed)] = correlation.take_settled(3 * SECOND)
    assert (observed.paths, observed.is_in_order) == (("a",), False)
    correlation.add_reads([read(1, "b", 2)])
    [(_, observed)] = correlation.take_settled(4 * SECOND)
    assert observed.paths == ("b",)
    assert set(observed.samples) == {1, 2, 3}


def order_of(correlation: ReadCorrelation, seconds: int) -> list[bool]:
    return [observed.is_in_order for _, observed in correlation.take_settled(later(seconds))]


def test_the_order_is_believed_after_some_batches_with_a_file_for_each_sample() -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 0, [[2 * batch, 2 * batch + 1] for batch in range(6)])
    correlation.add_reads([read(batch, f"{batch}-{one}", one) for batch in range(6) for one in range(2)])
    assert order_of(correlation, 6) == [False, False, True, True, True, True]


def test_a_batch_with_files_in_the_page_cache_is_not_taken_for_a_whole_one() -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 0, [[2 * batch, 2 * batch + 1] for batch in range(8)])
    # Two files per sample, of which some were read before: as many as samples in the second half.
    for batch in range(8):
        count = 4 if batch < 4 else 2
        correlation.add_reads([read(batch, f"{batch}-{one}", one) for one in range(count)])
    found = [(len(observed.paths), observed.is_in_order) for _, observed in correlation.take_settled(later(8))]
    assert [count for count, in_order in found if in_order] == [4, 4]


def test_what_other_threads_read_ahead_spoils_the_order() -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 0, [[2 * batch, 2 * batch + 1] for batch in range(8)])
    for batch in range(8):
        correlation.add_reads([read(batch, f"{batch}-{one}", one) for one in range(2)])
        correlation.add_reads([read(batch, f"ahead-{batch}", 5, thread=8)])
    assert not any(order_of(correlation, 8))


def test_a_dataset_that_loads_a_batch_as_it_likes_is_not_believed_the_order() -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 0, [[2 * batch, 2 * batch + 1] for batch in range(8)], one_by_one=False)
    correlation.add_reads([read(batch, f"{batch}-{one}", one) for batch in range(8) for one in range(2)])
    assert not any(order_of(correlation, 8))


def test_reads_of_helping_threads_count_where_one_thread_loads_and_reads_nothing() -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 0, [[1, 2]])
    correlation.add_reads([read(0, "a", thread=8), read(0, "b", thread=9)])
    [(_, observed)] = correlation.take_settled(later(1))
    assert (set(observed.paths), observed.is_in_order) == ({"a", "b"}, False)


def test_reads_outside_of_batches_are_forgotten_and_bounded() -> None:
    correlation = ReadCorrelation()
    correlation.add_reads([read(0, str(number)) for number in range(3 * MAX_READS)])
    loaded(correlation, 5, [[1]])
    assert correlation.take_settled(later(6)) == []
    assert len(correlation._reads) <= MAX_READS


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 7 * SECOND), st.integers(6, 8), st.sampled_from("abcdef")), max_size=40),
    st.booleans(),
    st.lists(st.integers(0, 12 * SECOND), max_size=6),
)
def test_whenever_it_is_asked_a_file_is_told_only_for_batches_during_which_it_was_read(
    batches: list[list[int]], reads: list[tuple[int, int, str]], is_prompt: bool, times: list[int]
) -> None:
    correlation = ReadCorrelation()
    loaded(correlation, 0, batches, is_prompt=is_prompt)
    correlation.add_reads([TimedRead(*one) for one in reads])
    for now in [*sorted(times), later(20)]:
        for _, observed in correlation.take_settled(now):
            during = [place for place, samples in enumerate(batches) if sorted(samples) == sorted(observed.samples)]
            for path in observed.paths:
                assert any(path == name and when // SECOND in during for when, _, name in reads)
