"""Bytes must never get into the pages of another file, whatever snapshots a mount and a daemon have."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cachefs.inodes import inode_of, slot_and_entry
from cachefs.mount.push import mounted_snapshots
from cachefs.mount.push.mounted_snapshots import MountedSnapshots
from cachefs.mount_spec import MountSpec
from tests.unit.mount.test_namespace import dataset

INODE = inode_of(100, 1)


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the mount show a snapshot at whatever directory."""

    def show(snapshot: str) -> None:
        monkeypatch.setattr(mounted_snapshots, "read_mounted_snapshot", lambda _: (slot_and_entry(INODE)[0], snapshot))

    return show


def test_a_mount_at_one_snapshot_shows_no_other(tmp_path: Path, show: Callable[[str], None]) -> None:
    old, new = dataset(tmp_path, "one", b"a"), dataset(tmp_path, "one", b"a", b"b")
    other = dataset(tmp_path, "two", b"c")
    show(old.snapshot)
    found = MountedSnapshots(MountSpec.parse(f"one@{old.snapshot}"), tmp_path, lambda: [new, other])
    assert found.find_snapshot(new.snapshot) is None
    place = found.find_snapshot(old.snapshot)
    assert place is not None
    assert place.inode(1) == INODE


def test_a_snapshot_file_that_was_written_anew_is_opened_anew(tmp_path: Path, show: Callable[[str], None]) -> None:
    view = dataset(tmp_path, "one", b"a")
    show(view.snapshot)
    found = MountedSnapshots(MountSpec.parse("one"), tmp_path, lambda: [view])
    before = found.find_snapshot(view.snapshot)
    assert before is not None
    os.truncate(view.path, 8192)
    assert found.find_snapshot(view.snapshot) is None
    dataset(tmp_path, "one", b"a")
    place = found.find_snapshot(view.snapshot)
    assert place is not None
    assert place.snapshot is not before.snapshot


def test_a_mount_of_several_shows_the_old_snapshot_for_a_while(tmp_path: Path, show: Callable[[str], None]) -> None:
    old, new = dataset(tmp_path, "one", b"a"), dataset(tmp_path, "one", b"a", b"b")
    found = MountedSnapshots(MountSpec.parse("all"), tmp_path, lambda: [new])
    show(old.snapshot)
    assert found.find_snapshot(new.snapshot) is None
    show(new.snapshot)
    place = found.find_snapshot(new.snapshot)
    assert place is not None
    assert place.inode(1) == INODE


def test_snapshots_that_no_order_was_for_lately_are_closed(
    tmp_path: Path, show: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted_snapshots, "MAX_OPEN_SNAPSHOTS", 2)
    views = [dataset(tmp_path, "one", *[b"%d" % name for name in range(count)]) for count in range(1, 6)]
    shown = views[:1]
    found = MountedSnapshots(MountSpec.parse("all"), tmp_path, lambda: shown)
    for view in views * 2:
        shown[0] = view
        show(view.snapshot)
        assert found.find_snapshot(view.snapshot) is not None
    opened = [file.path for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]
    assert len(opened) <= 2
