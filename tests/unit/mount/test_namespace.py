"""Inode numbers and the tree over several datasets."""

import contextlib
import itertools
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.errors import NotFound, SnapshotDamaged
from cachefs.inodes import ENTRY_BITS, ROOT
from cachefs.messages import DatasetView
from cachefs.mount.namespace import Namespace, named_datasets
from cachefs.mount_spec import MountSpec
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file


def dataset(directory: Path, name: str, *keys: bytes) -> DatasetView:
    objects = [ListedObject(key, 1, 1, b"v") for key in keys]
    path = build_snapshot_file(objects, f"file:///{name}", 4 << 20, lambda key: key, directory)
    return DatasetView(
        name=name,
        url=f"file:///{name}",
        snapshot=path.stem,
        path=str(path),
        files=1,
        directories=0,
        bytes=1,
        created_ns=1,
    )


def clock() -> Callable[[], int]:
    return itertools.count(1).__next__


def test_one_dataset_is_the_root_itself(tmp_path: Path) -> None:
    view = dataset(tmp_path, "one", b"a/b")
    namespace = Namespace(MountSpec.parse("one"), [view], clock())
    snapshot, number = namespace.resolve(ROOT)
    assert number == 0
    child = namespace.inode_beside(ROOT, 1)
    assert child >> ENTRY_BITS
    assert namespace.resolve(child) == (snapshot, 1)
    assert namespace.inode_beside(child, 0) == ROOT


def test_inodes_are_a_function_of_the_snapshot(tmp_path: Path) -> None:
    views = [dataset(tmp_path, "one", b"a"), dataset(tmp_path, "two", b"a")]
    first = Namespace(MountSpec.parse("all"), views, clock())
    inodes = {name: inode for name, inode, _ in first.datasets()}
    for _, _, snapshot in first.datasets():
        snapshot.close()
    second = Namespace(MountSpec.parse("two,one"), list(reversed(views)), clock())
    assert {name: inode for name, inode, _ in second.datasets()} == inodes
    assert len(set(inodes.values())) == 2
    assert all(inode < 1 << 63 for inode in inodes.values())


def test_two_names_of_one_snapshot_have_their_own_inodes(tmp_path: Path) -> None:
    view = dataset(tmp_path, "one", b"a")
    other = DatasetView(**{field: getattr(view, field) for field in view.__struct_fields__} | {"name": "two"})
    namespace = Namespace(MountSpec.parse("all"), [view, other], clock())
    (_, first, snapshot), (_, second, same) = namespace.datasets()
    assert first != second
    assert snapshot is same


def test_a_refresh_shows_new_inodes_and_keeps_the_old_ones_readable(tmp_path: Path) -> None:
    namespace = Namespace(MountSpec.parse("all"), [dataset(tmp_path, "one", b"a")], clock())
    ((_, before, old),) = namespace.datasets()
    changed = namespace.root_changed_ns
    namespace.update_datasets([dataset(tmp_path, "one", b"a", b"b")])
    ((_, after, new),) = namespace.datasets()
    assert before != after
    assert namespace.root_changed_ns > changed
    assert namespace.resolve(before) == (old, 0)
    assert namespace.resolve(after) == (new, 0)


def test_a_dataset_that_is_gone_keeps_no_other_from_being_shown(tmp_path: Path) -> None:
    gone, there = dataset(tmp_path, "gone", b"a"), dataset(tmp_path, "there", b"b")
    before = Namespace(MountSpec.parse("all"), [gone, there], clock())
    inodes = {name: inode for name, inode, _ in before.datasets()}
    for _, _, snapshot in before.datasets():
        snapshot.close()
    Path(gone.path).unlink()
    after = Namespace(MountSpec.parse("all"), [gone, there], clock())
    assert {name: inode for name, inode, _ in after.datasets()} == {b"there": inodes[b"there"]}


def test_a_mount_of_one_dataset_that_is_gone_fails(tmp_path: Path) -> None:
    gone = dataset(tmp_path, "gone", b"a")
    Path(gone.path).unlink()
    with pytest.raises(NotFound, match="no snapshot file"):
        Namespace(MountSpec.parse("gone"), [gone], clock())


def test_of_several_datasets_those_at_a_snapshot_stay_at_it(tmp_path: Path) -> None:
    old, new = dataset(tmp_path, "one", b"a"), dataset(tmp_path, "one", b"b")
    other = dataset(tmp_path, "two", b"c")
    namespace = Namespace(MountSpec.parse(f"one@{old.snapshot[:8]},two"), [new, other], clock())
    namespace.update_datasets([new, other])
    assert {name: snapshot.id for name, _, snapshot in namespace.datasets()} == {
        b"one": old.snapshot,
        b"two": other.snapshot,
    }


def test_the_root_of_several_datasets_is_no_entry(tmp_path: Path) -> None:
    namespace = Namespace(MountSpec.parse("all"), [dataset(tmp_path, "one", b"a")], clock())
    with pytest.raises(NotFound):
        namespace.resolve(ROOT)


def test_an_older_snapshot_is_found_by_its_first_digits(tmp_path: Path) -> None:
    old, new = dataset(tmp_path, "one", b"a"), dataset(tmp_path, "one", b"b")
    (found,) = named_datasets(MountSpec.parse(f"one@{old.snapshot[:8]}"), [new])
    assert found.snapshot == old.snapshot
    assert Snapshot(Path(found.path)).find_path(b"a") is not None


@pytest.mark.parametrize("spec", ["other", "one,other", "one@ffffffffffff", "one@../x", ""])
def test_an_unknown_spec_names_what_is_known(tmp_path: Path, spec: str) -> None:
    with pytest.raises(NotFound) as caught:
        named_datasets(MountSpec.parse(spec), [dataset(tmp_path, "one", b"a")])
    assert "one" in str(caught.value)


def test_a_dataset_is_found_by_its_url(tmp_path: Path) -> None:
    view = dataset(tmp_path, "one", b"a")
    assert str(MountSpec.parse("file:///one/").resolve_url([view])) == "one"
    with pytest.raises(NotFound, match="cachectl dataset add NAME s3://other"):
        MountSpec.parse("s3://other").resolve_url([view])


def open_files() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found += os.readlink(f"/proc/self/fd/{name}").endswith(".snapshot")
    return found


def test_snapshots_are_opened_when_needed_and_closed_when_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    views = [dataset(tmp_path, "one", *(b"%d" % key for key in range(count + 1))) for count in range(20)]
    ours = Namespace(MountSpec.parse("all"), [views[0]], clock())
    assert open_files() == before
    roots = []
    for view in views:
        ours.update_datasets([view])
        ((_, root),) = ours.roots()
        roots.append(root)
        assert ours.resolve(root)[0].id == view.snapshot
    assert open_files() == before + len(views)
    monkeypatch.setattr("cachefs.mount.namespace.MAX_OLD_SNAPSHOTS", 3)
    ours.close_idle()
    assert open_files() == before + 4
    assert [ours.resolve(root)[0].id for root in roots] == [view.snapshot for view in views]
    monkeypatch.setattr("cachefs.mount.namespace.IDLE_SECONDS", 0.0)
    ours.close_idle()
    assert open_files() == before + 1
    ours.update_datasets([])
    ours.close_idle()
    assert open_files() == before


def test_a_dataset_that_cannot_be_opened_now_is_listed(tmp_path: Path) -> None:
    views = [dataset(tmp_path, "one", b"a"), dataset(tmp_path, "two", b"b")]
    ours = Namespace(MountSpec.parse("all"), views, clock())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert ours.datasets() == []
        assert [name for name, _ in ours.roots()] == [b"one", b"two"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [name for name, _, _ in ours.datasets()] == [b"one", b"two"]


@pytest.mark.parametrize("spec", ["one", "all"])
def test_a_snapshot_whose_file_was_truncated_is_let_go_and_comes_back_with_its_file(tmp_path: Path, spec: str) -> None:
    keys = [b"%d" % number for number in range(200)]
    view = dataset(tmp_path, "one", *keys)
    namespace = Namespace(MountSpec.parse(spec), [view], clock())
    [(_, root, snapshot)] = namespace.datasets()
    child = namespace.inode_beside(root, 150)
    namespace.close_idle()
    assert namespace.resolve(child)[0] is snapshot
    os.truncate(view.path, 8192)
    namespace.close_idle()
    with pytest.raises(SnapshotDamaged, match="refresh the dataset"):
        namespace.resolve(child)
    assert dataset(tmp_path, "one", *keys) == view
    fresh, number = namespace.resolve(child)
    assert fresh.entry(number) == fresh.find_path(fresh.path(number))
    Path(view.path).unlink()
    namespace.close_idle()
    assert namespace.resolve(child)[0] is fresh, "what is unlinked can still be read"


def test_who_has_not_seen_all_agrees_on_all_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.mount.namespace.slot_of", lambda _: 7)  # any two have the same
    monkeypatch.setattr("cachefs.mount.namespace.MAX_KNOWN_SLOTS", 5)
    views = [dataset(tmp_path, "one", *(b"%d" % key for key in range(count + 1))) for count in range(12)]
    one = Namespace(MountSpec.parse("all"), [views[0]], clock())
    for view in views[1:8]:
        one.update_datasets([view])
    two = Namespace(MountSpec.parse("all"), [views[0]], clock())
    two.adopt_slots(one.known_slots(), [views[7]], one.root_changed_ns)
    for view in views[8:]:
        for ours in (one, two):
            ours.update_datasets([view])
        assert two.known_slots() == one.known_slots()
        assert two.roots() == one.roots()
    assert len(one.known_slots()) == 5
