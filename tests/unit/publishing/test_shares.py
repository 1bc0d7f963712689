"""From samples to files: which files are published, and how orders and positions of samples become those of files."""

from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cachefs.inodes import ENTRY_BITS, ENTRY_MASK
from cachefs.mount_table import MountPoint
from cachefs.publishing.files import shares as module
from cachefs.publishing.files.shares import FileShare, find_shares
from cachefs.publishing.mount_resolver import MountResolver

POINT = MountPoint(Path("/mnt"), "0:1", "cachefs:images")


def share(samples: list[int], length: int) -> FileShare:
    return FileShare(
        POINT, 1, numpy.arange(len(samples), dtype=numpy.uint32), numpy.array(samples, numpy.int64), length
    )


@given(
    files=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    order=st.lists(st.integers(0, 25), max_size=30),
    position=st.integers(0, 30),
)
def test_orders_and_positions_are_those_of_a_loop(files: list[int], order: list[int], position: int) -> None:
    samples = [sample for sample, count in enumerate(files) for _ in range(count)]
    position = min(position, len(order))
    expected = [file for sample in order for file in range(len(samples)) if samples[file] == sample]
    before = [file for sample in order[:position] for file in range(len(samples)) if samples[file] == sample]
    of_files = share(samples, len(files))
    asked = numpy.array(order, numpy.uint32)
    assert of_files.file_order(asked).tolist() == expected
    if not of_files.is_one_to_one:
        assert of_files.file_position(asked, position) == len(before)
    assert of_files.is_one_to_one == all(count == 1 for count in files)


def test_records_are_counted_by_the_daemon() -> None:
    records = FileShare(POINT, 1, numpy.arange(2, dtype=numpy.uint32), numpy.arange(2), 2, of_records=True)
    assert records.is_one_to_one
    assert records.file_order(numpy.array([7, 5], numpy.uint32)).tolist() == [7, 5]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose inodes look like a mount's: those of `two` belong to another snapshot."""
    for name in ("one/a", "one/b", "two/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    real = module._inode_numbers

    def like_a_mount(directory: str, names: list[str]) -> NDArray[numpy.int64]:
        slot = 2 if directory.endswith("two/") else 1
        found = real(directory, names)
        return numpy.where(found > 0, (found & ENTRY_MASK) | slot << ENTRY_BITS, 0)

    monkeypatch.setattr(module, "_inode_numbers", like_a_mount)
    return tmp_path


def entry(path: Path) -> int:
    return path.stat().st_ino & ENTRY_MASK


def test_files_are_grouped_by_snapshot_and_others_left_out(tree: Path) -> None:
    places = MountResolver([MountPoint(tree, "0:1", "cachefs:all")])
    files = [f"{tree}/two/c", f"{tree}/one/b", "/elsewhere/x", f"{tree}/one/gone", f"{tree}/one/a"]
    one, two = sorted(find_shares(files, places), key=lambda share: share.slot)
    assert one.entries.tolist() == [entry(tree / "one/b"), entry(tree / "one/a")]
    assert one.samples.tolist() == [1, 4]
    assert (two.slot, two.entries.tolist(), two.samples.tolist()) == (2, [entry(tree / "two/c")], [0])
    assert one.file_order(numpy.array([4, 0, 1], numpy.uint32)).tolist() == [1, 0]


def test_several_files_of_a_sample_stay_in_the_order_they_were_opened(tree: Path) -> None:
    (found,) = find_shares(
        [[f"{tree}/one/b", f"{tree}/one/a"], []], MountResolver([MountPoint(tree, "0:1", "cachefs:one")])
    )
    assert found.entries.tolist() == [entry(tree / "one/b"), entry(tree / "one/a")]
    assert found.samples.tolist() == [0, 0]
    assert found.length == 2


def test_places_follow_links_to_directories_and_prefer_inner_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    points = [MountPoint(tmp_path / "outer", "0:1", "cachefs:o"), MountPoint(inner, "0:2", "cachefs:i")]
    places = MountResolver(points)
    assert places.mount_of(f"{tmp_path}/link/x") == points[1]
    assert places.mount_of(f"{tmp_path}/outer/inner/../x") == points[0]
    assert places.mount_of(f"{tmp_path}/outer-not/x") is None
    assert places.mount_of("relative") is None
    monkeypatch.chdir(inner)
    assert MountResolver(points).mount_of("relative") == points[1]


@pytest.mark.parametrize("few", [True, False])
def test_names_looked_up_one_by_one_are_those_of_a_listing(
    few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setattr(module, "FEW_NAMES", 100 if few else 0)
    names = ["file", "", ".", "..", "gone", "file/below", "link", "file"]
    file, link = (tmp_path / "file").stat().st_ino, (tmp_path / "link").lstat().st_ino
    assert module._inode_numbers(str(tmp_path), names).tolist() == [file, 0, 0, 0, 0, 0, link, file]
    assert module._inode_numbers(f"{tmp_path}/gone", names).tolist() == [0] * len(names)
    assert module._inode_numbers(f"{tmp_path}/file", names).tolist() == [0] * len(names)


def test_a_directory_of_which_few_files_are_wanted_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(10):
        (tmp_path / str(name)).touch()

    def list_nothing(directory: str) -> dict[str, int]:
        raise AssertionError(directory)

    monkeypatch.setattr(module, "_list_directory", list_nothing)
    names = ["7", "1", *["3"] * 10]
    expected = [(tmp_path / name).stat().st_ino for name in names]
    assert module._inode_numbers(str(tmp_path), names).tolist() == expected


def test_many_directories_are_looked_into_as_few_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount, files = tmp_path / "mnt", []
    for number in range(3 * module.THREADS):
        directory = (mount if number % 3 else tmp_path / "elsewhere") / str(number)
        directory.mkdir(parents=True)
        names = ["a", "b", "c", "d", "e"][: 1 + number % 5]
        for name in names:
            (directory / name).touch()
        files.append([f"{directory}/{name}" for name in [*names, "gone"]])
    slot = MountPoint(mount, "0:1", "cachefs:images")
    monkeypatch.setattr(module, "slots_and_entries", lambda inodes: (numpy.sign(inodes), inodes & ENTRY_MASK))
    monkeypatch.setattr(module, "DIRECTORIES_AT_ONCE", 5)
    (many,) = find_shares(files, MountResolver([slot]))
    expected = [
        (sample, Path(path).stat().st_ino & ENTRY_MASK)
        for sample, paths in enumerate(files)
        for path in paths
        if path.startswith(f"{mount}/") and not path.endswith("gone")
    ]
    assert list(zip(many.samples.tolist(), many.entries.tolist(), strict=True)) == expected
    monkeypatch.setattr(module, "THREADS", len(files))
    (few,) = find_shares(files, MountResolver([slot]))
    assert (few.samples.tolist(), few.entries.tolist()) == (many.samples.tolist(), many.entries.tolist())
