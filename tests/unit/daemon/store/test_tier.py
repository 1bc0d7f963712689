"""What a tier finds in its directory at a start, and what it leaves alone."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.block import MEMORY, SSD, BlockLocation
from cachefs.errors import Busy, ConfigError
from cachefs.segment import segment_path
from cachefs_daemon.store import batch_io, capacity, segment_writer
from cachefs_daemon.store.segment_writer import SegmentFile
from cachefs_daemon.store.tier_directory import TierDirectory
from tests.blockstore import OpenStore, disk_usage, fill, key_of, opened, readable, store_config

ALL = range(60)


def location_of(store: OpenStore, number: int) -> BlockLocation:
    location = store.get(key_of(number))
    assert location is not None
    return location


def test_a_segment_that_cannot_be_read_costs_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = store_config(root, memory=1 << 20, ssd=12 << 20)
    with opened(config) as store:
        fill(store, ALL)
        bad = location_of(store, 30)
        assert bad.tier == SSD
        lost = {n for n in ALL if (at := location_of(store, n)).tier == SSD and at.segment == bad.segment}
    survey = segment_writer.survey

    def fail(file: SegmentFile) -> tuple[int, list[tuple[int, int]]]:
        if file.root.name == "ssd" and file.number == bad.segment:
            raise OSError(errno.EIO, "Input/output error")
        return survey(file)

    monkeypatch.setattr(segment_writer, "survey", fail)
    before = segment_path(root / "ssd", bad.segment).read_bytes()
    with opened(config) as store:
        assert readable(store, ALL) == set(ALL) - lost
        assert f"segments in {root}/ssd cannot be used ({bad.segment:08x}.seg: Input/output error)" in caplog.text
        fill(store, range(100, 200))
        usage = store.usage()[SSD]
        assert disk_usage(usage.directory) <= usage.used + 4096 <= usage.budget
    assert segment_path(root / "ssd", bad.segment).read_bytes() == before, "somebody has written into it"
    monkeypatch.undo()
    with opened(config) as store:
        assert readable(store, ALL) >= lost, "it is sound again, and so are its blocks"


def test_a_tier_whose_directory_cannot_be_listed_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = store_config(root, memory=1 << 20)
    with opened(config) as store:
        fill(store, ALL)
    listing = TierDirectory.list_segments

    def fail(directory: TierDirectory) -> object:
        if directory.path.name == "ssd":
            raise OSError(errno.EIO, "Input/output error")
        return listing(directory)

    with monkeypatch.context() as patched:
        patched.setattr(TierDirectory, "list_segments", fail)
        with opened(config) as store:
            store.maintain()
            assert "Input/output error" in store.usage()[SSD].problem
            assert store.put(key_of(100), b"goes elsewhere") is not None
            assert store.usage()[SSD].blocks == 0
    with opened(config) as store:
        assert len(readable(store, ALL)) > 40


def test_what_somebody_has_planted_is_neither_read_nor_written(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = store_config(root, ssd=0)
    with opened(config) as store:
        fill(store, range(5))
        segment = location_of(store, 0).segment
    victim = root / "victim"
    victim.write_bytes(b"root only")
    tier = root / "memory"
    os.chown(segment_path(tier, segment), 65534, 65534)
    segment_path(tier, segment + 1).symlink_to(victim)
    os.link(victim, segment_path(tier, segment + 2))
    os.mkfifo(segment_path(tier, segment + 3))
    with opened(config) as store:
        assert store.keys() == []
        assert "2 of 2 segments" in caplog.text
        fill(store, range(100, 130))
        store.maintain()
        assert readable(store, range(100, 130)) == set(range(100, 130))
    assert victim.read_bytes() == b"root only"


def test_a_new_segment_never_takes_a_file_that_is_there(root: Path) -> None:
    with opened(store_config(root, ssd=0)) as store:
        fill(store, range(1))
        ahead = [segment_path(root / "memory", location_of(store, 0).segment + n) for n in (1, 2)]
        for path in ahead:
            path.write_bytes(b"not ours")
        fill(store, range(30))
        assert readable(store, range(30)) == set(range(30))
    assert [path.read_bytes() for path in ahead] == [b"not ours"] * 2


def test_the_last_segment_is_written_on_after_a_restart(root: Path) -> None:
    config = store_config(root, ssd=0)
    for number in range(5):
        with opened(config) as store:
            fill(store, range(number, number + 1))
            assert store.usage()[0].segments == 1
            assert readable(store, range(number + 1)) == set(range(number + 1))
            assert disk_usage(root / "memory") <= store.usage()[0].used


def test_a_segment_of_an_earlier_version_is_read_but_not_written_on(root: Path) -> None:
    """It was not made at its full size, and on XFS would take more disk the longer it grows."""
    config = store_config(root, ssd=0)
    with opened(config) as store:
        fill(store, range(3))
        old = location_of(store, 2)
    os.truncate(segment_path(root / "memory", old.segment), old.offset + old.length)
    with opened(config) as store:
        fill(store, range(3, 6))
        assert readable(store, range(6)) == set(range(6))
        assert location_of(store, 3).segment > old.segment


def test_a_directory_that_was_moved_away_is_noticed_and_made_again(root: Path) -> None:
    config = store_config(root, ssd=0)
    with opened(config) as store:
        fill(store, range(5))
        (root / "memory").rename(root / "away")
        store.maintain()
        fill(store, range(10, 15))
        assert location_of(store, 12) is not None
        assert (root / "memory").is_dir()
        with pytest.raises(Busy, match="belongs to another running daemon"):
            OpenStore(replace(config, state_dir=root / "other"))


def test_another_directory_in_its_place_takes_nothing(root: Path) -> None:
    with opened(store_config(root)) as store:
        fill(store, range(5))
        (root / "memory").rename(root / "away")
        (root / "memory").mkdir(mode=0o750)
        store.maintain()
        assert "another directory has been put in its place" in store.usage()[0].problem
        assert list((root / "memory").iterdir()) == []
        (root / "memory").rmdir()
        (root / "away").rename(root / "memory")
        store.maintain()
        assert store.usage()[0].problem == ""


def test_file_systems_that_free_more_than_a_page_at_once_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = store_config(root)
    with monkeypatch.context() as patched:
        patched.setattr(TierDirectory, "probe", lambda self: 64 << 10)
        with pytest.raises(ConfigError, match="frees no less than 65536 bytes at a time"):
            OpenStore(config)
    OpenStore(config).close()


def test_a_memory_tier_on_a_disk_is_said(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = store_config(root, ssd=0)
    with opened(config):
        assert "is on a disk" not in caplog.text
    with opened(replace(config, memory=replace(config.memory, directory=tmp_path / "memory"))):
        assert f"[memory] dir {tmp_path}/memory is on a disk" in caplog.text


def test_what_was_allocated_and_not_written_is_freed_at_the_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On btrfs, where a daemon may be killed between the two. Here the file system is another one."""
    monkeypatch.setattr(capacity, "BTRFS", capacity.IN_MEMORY[0])
    config = store_config(root, ssd=0)
    with opened(config) as store:
        fill(store, range(5))
        segment = segment_path(root / "memory", location_of(store, 4).segment)
        with segment.open("r+b") as file:
            os.posix_fallocate(file.fileno(), segment.stat().st_size - 200_000, 100_000)
        assert disk_usage(root / "memory") > store.usage()[0].used
    with opened(config) as store:
        assert disk_usage(root / "memory") <= store.usage()[0].used
        assert readable(store, range(5)) == set(range(5))


def test_a_retry_ends_at_the_first_hole_that_fails_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be millions of them, and a retry every two seconds. The one that always fails is in nobody's way."""
    tried: list[int] = []
    punch_many, free_range = batch_io.punch_many, segment_writer.free_range
    bad = -1

    def refuse(directory: int, flags: int, spans: Sequence[batch_io.Span]) -> list[int]:
        tried.extend(start for _, start, _ in spans)
        results = punch_many(directory, flags, [one for one in spans if bad not in (-1, one[1])])
        return [-errno.EROFS if bad in (-1, start) else results.pop(0) for _, start, _ in spans]

    def refuse_the_probe(fd: int, start: int, length: int) -> None:
        if bad in (-1, start):
            raise OSError(errno.EROFS, "Read-only file system")
        free_range(fd, start, length)

    with opened(store_config(root, ssd=0)) as store:
        fill(store, range(8), size=1000)
        monkeypatch.setattr(batch_io, "punch_many", refuse)
        monkeypatch.setattr(segment_writer, "free_range", refuse_the_probe)
        places = [location for key in sorted(store.keys()) if (location := store.get(key)) is not None]
        bad_one = segment_writer.record_start(places[3])
        store.evict(store.keys())
        used = store.usage()[MEMORY].used
        tried.clear()
        store.retry()
        assert len(tried) == 1
        bad = bad_one
        tried.clear()
        for _ in range(2):
            store.retry()
        assert len(set(tried)) == 8
        assert tried.count(bad) == 2
        assert 0 < store.usage()[MEMORY].used < used
        bad = -2
        store.retry()
        assert (store.usage()[MEMORY].used, store.usage()[MEMORY].problem) == (0, "")


def test_a_hole_that_always_fails_closes_its_tier_for_a_moment_only(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_config(root, memory=1 << 20)) as store:
        fill(store, ALL)
        bad = location_of(store, 30)
        assert bad.tier == SSD
        hole = bad.segment, segment_writer.record_start(bad)
        punch = segment_writer.punch

        def fail(
            directory: int, spans: Sequence[segment_writer.SegmentSpan]
        ) -> tuple[list[segment_writer.SegmentSpan], OSError | None]:
            if any((number, start) == hole for number, start, _ in spans):
                return [*spans], OSError(errno.EIO, "Input/output error")
            return punch(directory, spans)

        with monkeypatch.context() as patched:
            patched.setattr(segment_writer, "punch", fail)
            store.evict([key_of(30)])
            assert "Input/output error" in store.usage()[SSD].problem
            used = store.usage()[SSD].used
            for _ in range(3):
                store.maintain()
                assert store.usage()[SSD].problem == ""
            assert store.usage()[SSD].used == used, "its bytes are still there"
            fill(store, range(100, 110))
            assert location_of(store, 109).tier == SSD
        used = store.usage()[SSD].used
        store.maintain()
        assert store.usage()[SSD].used < used
