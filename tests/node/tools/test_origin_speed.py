"""An origin is asked for no more than was said before."""

import os
from pathlib import Path

import pytest

from cachefs.messages import OriginOptions
from cachefs.snapshot import Snapshot
from cachefs_daemon.origin.base import OriginSettings
from cachefs_tools.origin_speed import MeasurementBounds, measure_origin, plan_reads, sampled_files
from tests.daemon import Daemon

LOOK = MeasurementBounds(small=5, widths=(1, 3), large=4, large_bytes=1000, seconds=20.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    for number in range(30):
        (directory / f"d{number % 3}").mkdir(parents=True, exist_ok=True)
        (directory / f"d{number % 3}/{number}").write_bytes(os.urandom(700 * (number % 5)))
    return directory


def test_reads_are_counted_and_a_failure_is_told(tmp_path: Path, source: Path) -> None:
    with Daemon(tmp_path / "node") as daemon:
        path = Path(daemon.add_dataset("tree", f"file://{source}").path)
        speed = measure_origin(path, OriginOptions(), OriginSettings(), LOOK)
        assert speed.error == ""
        assert speed.requests == LOOK.max_requests == 13
        assert 0 < speed.bytes <= LOOK.max_bytes
        assert [each.width for each in speed.throughput] == [1, 3]
        assert 0 < speed.p50 <= speed.p99
        snapshot = Snapshot(path)
        try:
            files = sampled_files(snapshot, 10)
            assert len({file.number for file in files}) == 10
            assert all(file.size for file in files)
            assert len(sampled_files(snapshot, 1000)) == 24  # those that are not empty
            reads = plan_reads(snapshot, files[:1], 7, 100)
            assert all(read.offset + read.length <= read.size for read in reads)
            assert len({read.offset for read in reads}) > 1
        finally:
            snapshot.close()
        for file in source.glob("*/*"):
            file.write_bytes(b"changed")
        assert measure_origin(path, OriginOptions(), OriginSettings(), LOOK).error == "ObjectChanged"
