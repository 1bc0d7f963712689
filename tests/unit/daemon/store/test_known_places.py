"""What the daemon remembers of the index is never older than the index."""

import random
import threading

from cachefs_daemon.store.known_places import UNKNOWN, KnownPlaces
from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import Location


def place(number: int) -> Location:
    return Location(0, 0, number, 1, bytes(8))


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
    known, index = KnownPlaces(most), dict.fromkeys(KEYS)
    truth: dict[bytes, Location | None] = {**index}
    readers: list[tuple[int, list[tuple[bytes, Location | None]]]] = []
    for number, (step, which) in enumerate(steps):
        keys = [KEYS[one] for one in which]
        if step == "change":
            changes = {key: place(number) if number % 3 else None for key in keys}
            truth.update(changes)
            known.change(changes)
        elif step == "begin":
            readers.append((known.mark, [(key, truth[key]) for key in keys]))
        elif readers:
            mark, found = readers.pop(number % len(readers))
            known.learn(found, mark)
        for key in KEYS:
            assert known.get(key) in (UNKNOWN, truth[key])


def test_what_was_learned_or_changed_of_late_is_known() -> None:
    known = KnownPlaces(most=4)
    known.learn([(b"a", place(1)), (b"b", None)], known.mark)
    known.change({b"c": place(2)})
    assert [known.get(key) for key in (b"a", b"b", b"c", b"d")] == [place(1), None, place(2), UNKNOWN]


def test_it_remembers_two_generations() -> None:
    known = KnownPlaces(most=100)
    for number in range(1000):
        known.change({b"%d" % number: place(number)})
        known.learn([(b"x%d" % number, None)], known.mark)
    remembered = [number for number in range(1000) if known.get(b"%d" % number) is not UNKNOWN]
    assert 50 <= len(remembered) <= 100
    assert remembered[-1] == 999


def test_with_threads_nobody_is_told_what_is_older_than_a_change_that_is_done() -> None:
    """One thread changes an index; others read it, and learn."""
    known, index, changed = KnownPlaces(most=3), dict.fromkeys(KEYS, place(0)), dict.fromkeys(KEYS, 0)
    done, wrong = threading.Event(), []

    def read(seed: int) -> None:
        choose = random.Random(seed)
        while not done.is_set():
            key = choose.choice(KEYS)
            before = changed[key]
            found = known.get(key)
            if found is UNKNOWN:
                mark = known.mark
                known.learn([(key, index[key])], mark)
            elif not isinstance(found, Location) or found.offset < before:
                wrong.append((key, before, found))

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    choose = random.Random(9)
    for number in range(1, 5_000):
        key = choose.choice(KEYS)
        index[key] = place(number)
        known.change({key: place(number)})
        changed[key] = number
    done.set()
    for reader in readers:
        reader.join(60)
    assert not wrong
