"""From samples to files: which files are published, and how orders and positions of samples become those of files."""

from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cachefs.inodes import ENTRY_BITS, ENTRY_MASK
from cachefs.mount_table import MountPoint
from cachefs.publishing import shares as module
from cachefs.publishing.places import Places
from cachefs.publishing.shares import Share, shares

POINT = MountPoint(Path("/mnt"), "0:1", "cachefs:images")


def share(samples: list[int], length: int) -> Share:
    return Share(POINT, 1, numpy.arange(len(samples), dtype=numpy.uint32), numpy.array(samples, numpy.int64), length)


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
    assert of_files.order(asked).tolist() == expected
    if not of_files.is_plain:
        assert of_files.position(asked, position) == len(before)
    assert of_files.is_plain == all(count == 1 for count in files)


def test_records_are_counted_by_the_daemon() -> None:
    records = Share(POINT, 1, numpy.arange(2, dtype=numpy.uint32), numpy.arange(2), 2, of_records=True)
    assert records.is_plain
    assert records.order(numpy.array([7, 5], numpy.uint32)).tolist() == [7, 5]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose inodes look like a mount's: those of `two` belong to another snapshot."""
    for name in ("one/a", "one/b", "two/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    real = module._inodes

    def like_a_mount(directory: str, names: list[str]) -> NDArray[numpy.int64]:
        slot = 2 if directory.endswith("two") else 1
        found = real(directory, names)
        return numpy.where(found > 0, (found & ENTRY_MASK) | slot << ENTRY_BITS, 0)

    monkeypatch.setattr(module, "_inodes", like_a_mount)
    return tmp_path


def entry(path: Path) -> int:
    return path.stat().st_ino & ENTRY_MASK


def test_files_are_grouped_by_snapshot_and_others_left_out(tree: Path) -> None:
    places = Places([MountPoint(tree, "0:1", "cachefs:all")])
    files = [f"{tree}/two/c", f"{tree}/one/b", "/elsewhere/x", f"{tree}/one/gone", f"{tree}/one/a"]
    one, two = sorted(shares(files, places), key=lambda share: share.slot)
    assert one.entries.tolist() == [entry(tree / "one/b"), entry(tree / "one/a")]
    assert one.samples.tolist() == [1, 4]
    assert (two.slot, two.entries.tolist(), two.samples.tolist()) == (2, [entry(tree / "two/c")], [0])
    assert one.order(numpy.array([4, 0, 1], numpy.uint32)).tolist() == [1, 0]


def test_several_files_of_a_sample_stay_in_the_order_they_were_opened(tree: Path) -> None:
    (found,) = shares([[f"{tree}/one/b", f"{tree}/one/a"], []], Places([MountPoint(tree, "0:1", "cachefs:one")]))
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
    places = Places(points)
    assert places.mount_of(f"{tmp_path}/link/x") == points[1]
    assert places.mount_of(f"{tmp_path}/outer/inner/../x") == points[0]
    assert places.mount_of(f"{tmp_path}/outer-not/x") is None
    assert places.mount_of("relative") is None
    monkeypatch.chdir(inner)
    assert Places(points).mount_of("relative") == points[1]
