"""Through which mounts a consumer is taken to read."""

from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs_daemon.mounts.mount_affinity import MountAffinity


def test_nobody_knows_from_a_read_or_two() -> None:
    read = MountAffinity()
    read.note_reads("m", {"c": 1})
    assert read.mounts_of("c") == frozenset()


def test_several_mounts_of_a_loader_count() -> None:
    read = MountAffinity()
    for _ in range(100):
        read.note_reads("a", {"c": 10})
        read.note_reads("b", {"c": 30})
    assert read.mounts_of("c") == {"a", "b"}


def test_reads_that_fit_by_chance_do_not() -> None:
    read = MountAffinity()
    for _ in range(100):
        read.note_reads("mine", {"c": 60})
        read.note_reads("a neighbour's", {"c": 1})
    assert read.mounts_of("c") == {"mine"}


def test_who_goes_on_through_another_mount_is_found_there() -> None:
    read = MountAffinity()
    read.note_reads("old", {"c": 100_000})
    for _ in range(20):
        read.note_reads("new", {"c": 64})
    assert read.mounts_of("c") == {"new"}


def test_each_consumer_has_its_own_and_those_that_ended_are_forgotten() -> None:
    read = MountAffinity()
    read.note_reads("a", {"one": 100, "two": 0})
    read.note_reads("b", {"two": 100})
    assert (read.mounts_of("one"), read.mounts_of("two")) == ({"a"}, {"b"})
    read.forget_others({"two"})
    assert (read.mounts_of("one"), read.mounts_of("two")) == (frozenset(), {"b"})


def test_who_reads_through_other_mounts_is_no_audience_here() -> None:
    read = MountAffinity()
    read.note_reads("here", {"one": 100})
    read.note_reads("there", {"two": 100, "three": 100})
    one, two, three, unknown = (
        PushReader(key, snapshot, 0, 0, 0)
        for key, snapshot in (("one", "a"), ("two", "a"), ("three", "b"), ("unknown", "c"))
    )
    audience = read.consumers_of("here", [one, two, three, unknown])
    assert (audience.readers, audience.read_elsewhere) == ([one, unknown], {"b"})
    audience = read.consumers_of("there", [one, two, three, unknown])
    assert (audience.readers, audience.read_elsewhere) == ([two, three, unknown], frozenset())
