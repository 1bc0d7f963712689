"""What the daemon remembers of the index is never older than the index."""

import random
import threading

from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import BlockLocation
from cachefs_daemon.store.index_writer import NOT_CACHED, RecentEntries


def place(number: int) -> BlockLocation:
    return BlockLocation(0, 0, number, 1, bytes(8))


KEYS = [b"%d" % number for number in range(12)]


@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(
            st.tuples(st.just("change"), st.lists(st.integers(0, 11), min_size=1, max_size=3)),
            st.tuples(st.just("begin"), st.lists(st.integers(0, 11), min_size=1, max_size=3)),
            st.tuples(st.just("end"), st.just([0])),
        ),
        max_size=60,
    ),
)
def test_a_slow_reader_never_brings_back_what_was_changed(most: int, steps: list[tuple[str, list[int]]]) -> None:
    """Readers begin (look into the index) and end (say what they found) in any order, with changes in between."""
    known, index = RecentEntries(most), dict.fromkeys(KEYS)
    truth: dict[bytes, BlockLocation | None] = {**index}
    readers: list[tuple[int, list[tuple[bytes, BlockLocation | None]]]] = []
    for number, (step, which) in enumerate(steps):
        keys = [KEYS[one] for one in which]
        if step == "change":
            changes = {key: place(number) if number % 3 else None for key in keys}
            truth.update(changes)
            known.apply_changes(changes)
        elif step == "begin":
            readers.append((known.generation, [(key, truth[key]) for key in keys]))
        elif readers:
            mark, found = readers.pop(number % len(readers))
            known.add_read_entries(found, mark)
        for key in KEYS:
            assert known.get(key) in (NOT_CACHED, truth[key])


def test_what_was_learned_or_changed_of_late_is_known() -> None:
    known = RecentEntries(most=4)
    known.add_read_entries([(b"a", place(1)), (b"b", None)], known.generation)
    known.apply_changes({b"c": place(2)})
    assert [known.get(key) for key in (b"a", b"b", b"c", b"d")] == [place(1), None, place(2), NOT_CACHED]


def test_it_remembers_two_generations() -> None:
    known = RecentEntries(most=100)
    for number in range(1000):
        known.apply_changes({b"%d" % number: place(number)})
        known.add_read_entries([(b"x%d" % number, None)], known.generation)
    remembered = [number for number in range(1000) if known.get(b"%d" % number) is not NOT_CACHED]
    assert 50 <= len(remembered) <= 100
    assert remembered[-1] == 999


def test_with_threads_nobody_is_told_what_is_older_than_a_change_that_is_done() -> None:
    """One thread changes an index; others read it, and learn."""
    known, index, changed = RecentEntries(most=3), dict.fromkeys(KEYS, place(0)), dict.fromkeys(KEYS, 0)
    done, wrong = threading.Event(), []

    def read(seed: int) -> None:
        choose = random.Random(seed)
        while not done.is_set():
            key = choose.choice(KEYS)
            before = changed[key]
            found = known.get(key)
            if found is NOT_CACHED:
                mark = known.generation
                known.add_read_entries([(key, index[key])], mark)
            elif not isinstance(found, BlockLocation) or found.offset < before:
                wrong.append((key, before, found))

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    choose = random.Random(9)
    for number in range(1, 5_000):
        key = choose.choice(KEYS)
        index[key] = place(number)
        known.apply_changes({key: place(number)})
        changed[key] = number
    done.set()
    for reader in readers:
        reader.join(60)
    assert not wrong
