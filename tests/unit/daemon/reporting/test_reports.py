"""How often a dataset was found to be read."""

from cachefs_daemon.reporting.reports import DatasetReads

from cachefs.mount_spec import MountSpec

DATASETS = {"a", "b"}


def test_a_look_counts_all_that_a_mount_with_new_reads_shows() -> None:
    reads = DatasetReads()
    one, both = MountSpec.parse("a"), MountSpec.parse("all")
    reads.look({"m": (one, 5), "n": (both, 0)}, DATASETS, 0.0)
    assert (reads.of("a"), reads.of("b")) == (1, 0)
    reads.look({"m": (one, 5), "n": (both, 0)}, DATASETS, 100.0)
    assert (reads.of("a"), reads.of("b")) == (1, 0)  # no new reads
    reads.look({"m": (one, 5), "n": (both, 1)}, DATASETS, 200.0)
    assert (reads.of("a"), reads.of("b")) == (2, 1)


def test_a_reader_that_goes_on_is_news_every_15_seconds() -> None:
    reads = DatasetReads()
    for second in range(60):
        reads.look({"m": (MountSpec.parse("a"), second + 1)}, DATASETS, float(second))
    assert reads.of("a") == 4


def test_a_dataset_that_is_removed_is_forgotten() -> None:
    reads = DatasetReads()
    reads.look({"m": (MountSpec.parse("a"), 1)}, DATASETS, 0.0)
    reads.look({}, {"b"}, 1.0)
    assert reads.of("a") == 0
