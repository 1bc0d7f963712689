"""Files of samples that are learned: what is kept, what other processes are told, and within which bounds."""

from pathlib import Path

import numpy
import pytest

from cachefs.inodes import inode_of
from cachefs.mount_table import MountPoint
from cachefs.publishing.files import learned as module
from cachefs.publishing.files.learned import LearnedFiles
from cachefs.publishing.mount_resolver import MountResolver

ONE, TWO = MountPoint(Path("/one"), "0:1", "cachefs:one"), MountPoint(Path("/two"), "0:2", "cachefs:two")
PLACES = MountResolver([ONE, TWO])


@pytest.fixture(autouse=True)
def _numbered_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file /one/N is entry N of the snapshot in slot 1; those below /two are in slot 2."""

    def file(path: str, places: MountResolver) -> tuple[MountPoint, int] | None:
        mount = places.mount_of(path)
        return None if mount is None else (mount, inode_of(1 if mount == ONE else 2, int(Path(path).name)))

    monkeypatch.setattr(module, "find_file", file)


def found(files: LearnedFiles) -> dict[int, list[tuple[int, int]]]:
    """Slot -> pairs of a sample and an entry."""
    return {
        share.slot: list(zip(share.samples.tolist(), share.entries.tolist(), strict=True))
        for share in files.make_shares()
    }


def test_samples_may_have_files_in_several_snapshots() -> None:
    files = LearnedFiles(5)
    files.learn_sample(3, ["/one/7", "/two/8", "/elsewhere/1", "/one/6"], PLACES)
    files.learn_sample(0, ["/one/9"], PLACES)
    files.learn_sample(0, ["/one/1"], PLACES)
    files.learn_sample(2, ["/elsewhere/9"], PLACES)
    files.learn_sample(5, ["/one/1"], PLACES)
    files.learn_sample(-1, ["/one/1"], PLACES)
    assert found(files) == {1: [(0, 9), (3, 7), (3, 6)], 2: [(3, 8)]}
    assert (files.count, files.own_row_count, files.is_full) == (2, 4, False)


def test_what_was_heard_is_learned_and_not_told_again() -> None:
    ours, theirs = LearnedFiles(4), LearnedFiles(4)
    ours.learn_sample(0, ["/one/1"], PLACES)
    theirs.learn_sample(0, ["/one/2"], PLACES)
    theirs.learn_sample(1, ["/two/3", "/one/3", "/one/4"], PLACES)
    theirs.learn_sample(2, ["/one/5"], PLACES)
    # A sample's files stay together, however few rows are asked for.
    assert len(theirs.read_rows(0, 2)[0]) == 4
    assert len(theirs.read_rows(4, 2)[0]) == 1
    ours.learn_rows(*theirs.read_rows(0, 100))
    ours.learn_rows(*theirs.read_rows(0, 100))
    assert found(ours) == {1: [(0, 1), (1, 3), (1, 4), (2, 5)], 2: [(1, 3)]}
    assert (ours.count, ours.own_row_count) == (3, 1)
    ours.learn_rows(numpy.array([[3, inode_of(1, 1)], [-1, inode_of(1, 1)], [4, inode_of(1, 1)]]), [ONE])
    assert ours.count == 4
    assert ours.is_full


def test_no_more_is_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 3)
    monkeypatch.setattr(module, "MAX_SAMPLES", 100)
    files, other = LearnedFiles(100), LearnedFiles(100)
    for sample in range(2):
        files.learn_sample(sample, [f"/one/{sample}"], PLACES)
    for sample in range(50, 53):
        other.learn_sample(sample, [f"/one/{sample}"], PLACES)
    files.learn_rows(*other.read_rows(0, 100))
    files.learn_sample(99, ["/one/1"], PLACES)
    assert files.is_full
    assert found(files) == {1: [(0, 0), (1, 1), (50, 50)]}
    assert LearnedFiles(101).is_full


def test_a_million_samples_take_few_bytes_each() -> None:
    files = LearnedFiles(1 << 16)
    for sample in range(1 << 16):
        files.learn_sample(sample, [f"/one/{sample}"], PLACES)
    held = sum(array.itemsize * len(array) for array in (files._own.samples, files._own.inodes)) + len(files._known)
    assert held == 13 << 16


def test_files_are_found_where_links_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mount = MountPoint(tmp_path, "0:1", "cachefs:all")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "out").symlink_to("/etc/passwd")
    # Inodes of other file systems name no snapshot.
    assert module.find_file(f"{tmp_path}/file", MountResolver([mount])) is None
    monkeypatch.setattr(module, "ENTRY_BITS", 0)
    inode = (tmp_path / "file").stat().st_ino
    assert module.find_file(f"{tmp_path}/file", MountResolver([mount])) == (mount, inode)
    assert module.find_file(f"{tmp_path}/link", MountResolver([mount])) == (mount, inode)
    for path in (f"{tmp_path}/out", f"{tmp_path}/gone", str(tmp_path), f"{tmp_path}/a\0b"):
        assert module.find_file(path, MountResolver([mount])) is None
