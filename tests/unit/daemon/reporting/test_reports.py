"""How often a dataset was found to be read."""

from cachefs_daemon.mounts.registry import MountReads
from cachefs_daemon.reporting.reports import DatasetReads

from cachefs.mount_spec import MountSpec

DATASETS = {"a": ["a2", "a1"], "b": ["b1"]}
ONE, ALL = MountSpec.parse("a"), MountSpec.parse("all")


def test_a_look_counts_what_a_mount_with_new_reads_shows_where_it_does_not_say_more() -> None:
    reads = DatasetReads()
    reads.look({"m": MountReads(ONE, 5), "n": MountReads(ALL, 0)}, DATASETS, 0.0)
    assert (reads.of("a"), reads.of("b")) == (1, 0)
    reads.look({"m": MountReads(ONE, 5), "n": MountReads(ALL, 0)}, DATASETS, 100.0)
    assert (reads.of("a"), reads.of("b")) == (1, 0)  # no new reads
    reads.look({"m": MountReads(ONE, 5), "n": MountReads(ALL, 1)}, DATASETS, 200.0)
    assert (reads.of("a"), reads.of("b")) == (2, 1)


def test_of_a_mount_of_several_datasets_those_count_that_are_read() -> None:
    reads = DatasetReads()
    reads.look({"n": MountReads(ALL, 5, {"b1": 1})}, DATASETS, 0.0)
    assert (reads.of("a"), reads.of("b")) == (0, 1)
    reads.look({"n": MountReads(ALL, 9, {"a1": 3, "b1": 1})}, DATASETS, 100.0)
    assert (reads.of("a"), reads.of("b")) == (1, 1)
    reads.look({"n": MountReads(ALL, 9, {"a1": 3, "b1": 1})}, DATASETS, 200.0)
    reads.look({"n": MountReads(ALL, 12, {"a1": 3, "b1": 2})}, DATASETS, 300.0)
    assert (reads.of("a"), reads.of("b")) == (1, 2)


def test_a_mount_whose_reads_an_earlier_daemon_has_heard_of_counts_for_what_is_read_later() -> None:
    reads = DatasetReads()
    reads.look({"n": MountReads(ALL, 5, {})}, DATASETS, 0.0)
    assert (reads.of("a"), reads.of("b")) == (0, 0)
    reads.look({"n": MountReads(ALL, 6, {"b1": 1})}, DATASETS, 100.0)
    assert (reads.of("a"), reads.of("b")) == (0, 1)


def test_of_a_mount_of_one_dataset_reads_of_a_snapshot_that_is_forgotten_count() -> None:
    reads = DatasetReads()
    reads.look({"m": MountReads(ONE, 5, {"a0": 1})}, DATASETS, 0.0)
    assert (reads.of("a"), reads.of("b")) == (1, 0)


def test_a_reader_that_goes_on_is_news_every_15_seconds() -> None:
    reads = DatasetReads()
    for second in range(60):
        reads.look({"m": MountReads(ONE, second + 1)}, DATASETS, float(second))
    assert reads.of("a") == 4


def test_a_dataset_that_is_removed_is_forgotten() -> None:
    reads = DatasetReads()
    reads.look({"m": MountReads(ONE, 1)}, DATASETS, 0.0)
    reads.look({}, {"b": []}, 1.0)
    assert reads.of("a") == 0
