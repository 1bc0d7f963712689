"""How often a dataset was found to be read."""

from cachefs.mount_spec import MountSpec
from cachefs_cluster.reporting.reports import DatasetReadCounts
from cachefs_daemon.mounts.registry import MountReadCounts

DATASETS = {"a": ["a2", "a1"], "b": ["b1"]}
ONE, ALL = MountSpec.parse("a"), MountSpec.parse("all")


def test_a_look_counts_what_a_mount_with_new_reads_shows_where_it_does_not_say_more() -> None:
    reads = DatasetReadCounts()
    reads.count_new_reads({"m": MountReadCounts(ONE, 5), "n": MountReadCounts(ALL, 0)}, DATASETS, 0.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (1, 0)
    reads.count_new_reads({"m": MountReadCounts(ONE, 5), "n": MountReadCounts(ALL, 0)}, DATASETS, 100.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (1, 0)  # no new reads
    reads.count_new_reads({"m": MountReadCounts(ONE, 5), "n": MountReadCounts(ALL, 1)}, DATASETS, 200.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (2, 1)


def test_of_a_mount_of_several_datasets_those_count_that_are_read() -> None:
    reads = DatasetReadCounts()
    reads.count_new_reads({"n": MountReadCounts(ALL, 5, {"b1": 1})}, DATASETS, 0.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (0, 1)
    reads.count_new_reads({"n": MountReadCounts(ALL, 9, {"a1": 3, "b1": 1})}, DATASETS, 100.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (1, 1)
    reads.count_new_reads({"n": MountReadCounts(ALL, 9, {"a1": 3, "b1": 1})}, DATASETS, 200.0)
    reads.count_new_reads({"n": MountReadCounts(ALL, 12, {"a1": 3, "b1": 2})}, DATASETS, 300.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (1, 2)


def test_a_mount_whose_reads_an_earlier_daemon_has_heard_of_counts_for_what_is_read_later() -> None:
    reads = DatasetReadCounts()
    reads.count_new_reads({"n": MountReadCounts(ALL, 5, {})}, DATASETS, 0.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (0, 0)
    reads.count_new_reads({"n": MountReadCounts(ALL, 6, {"b1": 1})}, DATASETS, 100.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (0, 1)


def test_of_a_mount_of_one_dataset_reads_of_a_snapshot_that_is_forgotten_count() -> None:
    reads = DatasetReadCounts()
    reads.count_new_reads({"m": MountReadCounts(ONE, 5, {"a0": 1})}, DATASETS, 0.0)
    assert (reads.count_of("a"), reads.count_of("b")) == (1, 0)


def test_a_reader_that_goes_on_is_news_every_15_seconds() -> None:
    reads = DatasetReadCounts()
    for second in range(60):
        reads.count_new_reads({"m": MountReadCounts(ONE, second + 1)}, DATASETS, float(second))
    assert reads.count_of("a") == 4


def test_a_dataset_that_is_removed_is_forgotten() -> None:
    reads = DatasetReadCounts()
    reads.count_new_reads({"m": MountReadCounts(ONE, 1)}, DATASETS, 0.0)
    reads.count_new_reads({}, {"b": []}, 1.0)
    assert reads.count_of("a") == 0
