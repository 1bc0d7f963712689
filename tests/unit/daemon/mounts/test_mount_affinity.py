"""Through which mounts a consumer is taken to read."""

from cachefs_daemon.mounts.mount_affinity import MountAffinity


def test_nobody_knows_from_a_read_or_two() -> None:
    read = MountAffinity()
    read.note("m", 1)
    assert read.mounts == frozenset()


def test_several_mounts_of_a_loader_count() -> None:
    read = MountAffinity()
    for _ in range(100):
        read.note("a", 10)
        read.note("b", 30)
    assert read.mounts == {"a", "b"}


def test_reads_that_fit_by_chance_do_not() -> None:
    read = MountAffinity()
    for _ in range(100):
        read.note("mine", 60)
        read.note("a neighbour's", 1)
    assert read.mounts == {"mine"}


def test_who_goes_on_through_another_mount_is_found_there() -> None:
    read = MountAffinity()
    read.note("old", 100_000)
    for _ in range(20):
        read.note("new", 64)
    assert read.mounts == {"new"}
