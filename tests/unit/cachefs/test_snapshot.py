"""A snapshot's tree equals what a simple reference builds from the same keys, and damage is never a wrong answer."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import content_id
from cachefs.errors import CachefsError, NotFound, SnapshotDamaged
from cachefs.snapshot import ROOT, Entry, Snapshot, verify
from cachefs.snapshot_builder import ListedObject, SnapshotBuilder, build_snapshot_file
from cachefs.snapshot_diff import compare_snapshots
from cachefs.spill_file import SpillFile

BLOCK_SIZE = 4 << 20


def identity(key: bytes) -> bytes:
    return b"s3:test:" + key


def listed(key: bytes, size: int = 1, mtime_ns: int = 7, version: bytes = b"v1") -> ListedObject:
    return ListedObject(key, size, mtime_ns, version)


def built(directory: Path, objects: list[ListedObject], url: str = "s3://bucket/prefix") -> Snapshot:
    return Snapshot(build_snapshot_file(objects, url, BLOCK_SIZE, identity, directory))


def all_entries(snapshot: Snapshot, directory: Entry) -> Iterator[tuple[bytes, Entry]]:
    for entry in snapshot.children(directory):
        yield snapshot.path(entry.number), entry
        if entry.is_dir:
            yield from all_entries(snapshot, entry)


def test_paths_are_right_however_many_directories_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.snapshot._MAX_CACHED_PARENTS", 2)
    keys = {b"%d/%d/%d" % (a, b, c) for a in range(3) for b in range(3) for c in range(2)} | {b"top"}
    snapshot = built(tmp_path, [listed(key) for key in sorted(keys)])
    for _ in range(2):
        paths = {path for path, entry in all_entries(snapshot, snapshot.entry(ROOT)) if not entry.is_dir}
        assert paths == keys
        assert len(snapshot._parents) <= 2


def usable(key: bytes) -> bool:
    return b"\0" not in key and all(part not in (b"", b".", b"..") and len(part) < 256 for part in key.split(b"/"))


def reference(objects: list[ListedObject]) -> tuple[dict[bytes, ListedObject], set[bytes]]:
    """(files by path, directories) by the plainest means."""
    directories: set[bytes] = set()
    files: dict[bytes, ListedObject] = {}
    for found in objects:
        key = found.key.removesuffix(b"/")
        if not usable(key):
            continue
        parts = key.split(b"/")
        directories |= {b"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if found.key.endswith(b"/"):
            directories.add(key)
        elif key not in files or (files[key].mtime_ns, files[key].size) <= (found.mtime_ns, found.size):
            files[key] = found
    return {path: found for path, found in files.items() if path not in directories}, directories


names = st.one_of(
    st.sampled_from(
        [b"a", b"b", b"a.", b"a!", b"ab", b"\xff", b"\x01", b".", b"..", b"", b"n" * 255, b"n" * 256, b"\0"]
    ),
    st.binary(min_size=1, max_size=3),
)
keys = st.lists(names, min_size=1, max_size=5).map(b"/".join)
objects_of_any_keys = st.lists(
    st.builds(ListedObject, keys, st.integers(0, 1 << 50), st.integers(-(1 << 62), 1 << 62), st.just(b"etag")),
    max_size=40,
    unique_by=lambda found: (found.key, found.mtime_ns, found.size),
)


@given(objects=objects_of_any_keys)
def test_tree_equals_reference(objects: list[ListedObject], tmp_path_factory: pytest.TempPathFactory) -> None:
    files, directories = reference(objects)
    snapshot = built(tmp_path_factory.mktemp("snapshot"), objects)
    root = snapshot.entry(ROOT)
    entries = dict(all_entries(snapshot, root))

    assert {path for path, entry in entries.items() if entry.is_dir} == directories
    assert {
        path: (entry.size, entry.mtime_ns, entry.version) for path, entry in entries.items() if not entry.is_dir
    } == {path: (found.size, found.mtime_ns, found.version) for path, found in files.items()}
    assert {entry.number for entry in entries.values()} == set(range(1, len(entries) + 1))
    for path, entry in entries.items():
        assert snapshot.find_path(path) == snapshot.entry(entry.number) == entry
        assert snapshot.lookup(entry.parent, entry.name + b"x" * 250) is None
        if entry.is_dir:
            children = [child.name for child in snapshot.children(entry)]
            assert children == sorted(children)
            assert [child.name for child in snapshot.children(entry, 1)] == children[1:]
        else:
            expected = content_id(identity(path), entry.version, entry.size, BLOCK_SIZE)
            assert entry.content == expected
            assert snapshot.size_and_content(entry.number) == (entry.size, expected)
    assert {snapshot.path(entry.number) for entry in snapshot.walk_files(root)} == set(files)
    assert (snapshot.files, snapshot.directories) == (len(files), len(directories))
    assert snapshot.bytes == sum(found.size for found in files.values())
    assert (snapshot.problem_count > 0) == bool(snapshot.problems())
    snapshot.close()


def test_order_of_the_listing_does_not_matter(tmp_path: Path) -> None:
    objects = [listed(b"d%d/f%d" % (i % 7, i)) for i in range(100)] + [listed(b"/bad"), listed(b"also//bad")]
    shuffled = random.Random(1).sample(objects, len(objects))
    assert build_snapshot_file(objects, "s3://b", 1 << 20, identity, tmp_path) == build_snapshot_file(
        shuffled, "s3://b", 1 << 20, identity, tmp_path
    )


@given(objects=objects_of_any_keys, at=st.integers(0, 40), data=st.data())
def test_neither_runs_nor_another_builder_change_the_snapshot(
    objects: list[ListedObject], at: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows go to the file in runs of any size, and a second builder goes on where a first one was."""
    directory = tmp_path_factory.mktemp("snapshot")
    whole = build_snapshot_file(objects, "s3://b", 1 << 20, identity, directory)
    with contextlib.closing(SpillFile(directory, directory / "rows")) as spill:
        first = SnapshotBuilder("s3://b", 1 << 20, identity, spill)
        for listed_object in objects[:at]:
            first.add_objects([listed_object])
            if data.draw(st.booleans()):
                first.export_state()
        state = first.export_state()
        first.add_objects(objects[at : at + 2])  # what comes after the state does not count
    with contextlib.closing(SpillFile(directory, directory / "rows")) as spill:
        second = SnapshotBuilder("s3://b", 1 << 20, identity, spill)
        second.restore_state(state)
        second.add_objects(objects[at:])
        assert second.objects == len(objects)
        assert second.write_snapshot(directory) == whole


def test_a_damaged_file_of_rows_is_not_taken_up(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, tmp_path / "rows")
    builder = SnapshotBuilder("s3://b", 1 << 20, identity, spill)
    builder.add_objects([listed(b"a"), listed(b"b")])
    state = builder.export_state()
    content = (tmp_path / "rows").read_bytes()
    for damaged in (content[:-1], content[:-1] + b"x", b"x" + content[1:], b""):
        (tmp_path / "rows").write_bytes(damaged)
        with pytest.raises(CachefsError):
            builder.restore_state(state)
    spill.close()


@pytest.mark.parametrize(
    "other",
    [
        {"url": "s3://other"},
        {"objects": [listed(b"a"), listed(b"c")]},
        {"objects": [listed(b"a"), listed(b"b", version=b"v2")]},
        {"objects": [listed(b"a"), listed(b"b", mtime_ns=8)]},
        {"objects": [listed(b"a"), listed(b"b"), listed(b"/bad")]},
    ],
)
def test_id_names_the_content(tmp_path: Path, other: dict[str, object]) -> None:
    facts: dict[str, object] = {"objects": [listed(b"a"), listed(b"b")], "url": "s3://one"}
    snapshots = [built(tmp_path, **facts), built(tmp_path, **(facts | other))]  # type: ignore[arg-type]
    assert snapshots[0].id != snapshots[1].id
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{found.id}.snapshot" for found in snapshots)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (b"/a", "slash"),
        (b"a//b", "slash"),
        (b"//", "slash"),
        (b"/", "slash"),
        (b"a/./b", "`.`"),
        (b"../a", "`..`"),
        (b"a/..", "`..`"),
        (b"a\0b", "NUL"),
        (b"x" * 256, "255"),
        (b"d", "directory"),
        (b"marker/", "5 bytes"),
    ],
)
def test_problem_keys_are_reported_and_left_out(tmp_path: Path, key: bytes, reason: str) -> None:
    snapshot = built(tmp_path, [listed(b"d/f"), listed(key, size=5)])
    ((reported, why),) = snapshot.problems()
    assert reported == key
    assert reason in why
    assert [snapshot.path(entry.number) for entry in snapshot.walk_files(snapshot.entry(ROOT))] == [b"d/f"]


@pytest.mark.parametrize("size", [-1, 1 << 61, 1 << 63, 1 << 70])
def test_what_has_a_size_that_no_file_can_have_is_reported(tmp_path: Path, size: int) -> None:
    snapshot = built(tmp_path, [listed(b"d/f"), listed(b"d/odd", size=size)])
    assert [(key, str(size) in why) for key, why in snapshot.problems()] == [(b"d/odd", True)]
    assert (snapshot.files, snapshot.bytes) == (1, listed(b"d/f").size)


@pytest.mark.parametrize(
    ("key", "mtime_ns", "shown"),
    [(b"f", 10**300, 1 << 62), (b"f", -(10**300), -(1 << 62)), (b"d/", 10**300, 1 << 62)],
)
def test_a_time_that_no_file_can_have_is_the_nearest_that_one_can(
    tmp_path: Path, key: bytes, mtime_ns: int, shown: int
) -> None:
    found = built(tmp_path, [listed(key, size=0, mtime_ns=mtime_ns)]).find_path(key.rstrip(b"/"))
    assert found is not None
    assert found.mtime_ns == shown


def test_of_a_key_listed_twice_the_newest_is_used(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(b"a", mtime_ns=2, version=b"new"), listed(b"a", mtime_ns=1, version=b"old")])
    found = snapshot.find_path(b"a")
    assert found is not None
    assert found.version == b"new"
    assert snapshot.problem_count == 1


def test_of_a_key_listed_twice_with_one_time_the_largest_is_used(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(b"a", 3, version=b"large"), listed(b"a", 2, version=b"small")])
    found = snapshot.find_path(b"a")
    assert found is not None
    assert found.version == b"large"
    assert snapshot.problems() == [
        (b"a", "is listed twice; the newest object is used, or the largest of several with the same time")
    ]


def test_the_same_object_listed_twice_is_no_problem(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(b"a"), listed(b"a")])
    assert (snapshot.files, snapshot.problem_count) == (1, 0)


def test_a_key_that_is_no_path_and_is_listed_twice_is_one_problem(tmp_path: Path) -> None:
    with contextlib.closing(SpillFile(tmp_path)) as spill:
        builder = SnapshotBuilder("file:///d", 8, identity, spill)
        builder.add_objects([listed(b"a//b")])
        builder.restore_state(builder.export_state())
        builder.add_objects([listed(b"a//b"), listed(b"c")])
        snapshot = Snapshot(builder.write_snapshot(tmp_path))
    assert (snapshot.problem_count, len(snapshot.problems())) == (1, 1)


def test_archived_files_are_counted_once_each_and_are_not_part_of_the_id(tmp_path: Path) -> None:
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    cold.mkdir()
    warm.mkdir()
    archived = replace(listed(b"d/a"), is_archived=True)
    before = built(cold, [archived, listed(b"d/b"), archived])
    after = built(warm, [listed(b"d/a"), listed(b"d/b")])
    assert (before.archived, after.archived) == (1, 0)
    assert before.id == after.id


def test_directories_alone_are_no_dataset_where_files_were_left_out(tmp_path: Path) -> None:
    with contextlib.closing(SpillFile(tmp_path)) as spill:
        builder = SnapshotBuilder("file:///d", 8, identity, spill)
        builder.add_objects([listed(b"data/", 0)])
        assert builder.exclusion_reason() == ""
        builder.report_problem(b"data/1", "is a symbolic link that leads out")
        assert "'data/1' is a symbolic link" in builder.exclusion_reason()


def test_where_nothing_is_left_the_first_reason_is_told(tmp_path: Path) -> None:
    with contextlib.closing(SpillFile(tmp_path)) as spill:
        builder = SnapshotBuilder("s3://bucket/prefix", 8, identity, spill)
        assert builder.exclusion_reason() == ""
        builder.report_problem(b"z", "is larger")
        builder.add_objects([listed(b"../x")])
        assert "'../x'" in builder.exclusion_reason()
        assert "(2 left out in all)" in builder.exclusion_reason()
        builder.add_objects([listed(b"x")])
        assert builder.exclusion_reason() == ""


def test_only_the_first_problems_are_kept_but_all_counted(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(b"/%04d" % number) for number in range(1500)])
    assert snapshot.problem_count == 1500
    assert [key for key, _ in snapshot.problems()] == [b"/%04d" % number for number in range(1000)]


def test_directories_have_the_newest_mtime_below_them(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(b"a/b/old", mtime_ns=3), listed(b"a/c/new", mtime_ns=9), listed(b"a/d/", 0, 5)])
    times = {path: entry.mtime_ns for path, entry in all_entries(snapshot, snapshot.entry(ROOT))}
    assert times == {b"a": 9, b"a/b": 3, b"a/c": 9, b"a/d": 5, b"a/b/old": 3, b"a/c/new": 9}
    assert snapshot.entry(ROOT).mtime_ns == 9


def test_a_path_three_hundred_deep(tmp_path: Path) -> None:
    path = b"/".join(b"d%d" % depth for depth in range(300)) + b"/file"
    snapshot = built(tmp_path, [listed(path)])
    found = snapshot.find_path(path)
    assert found is not None
    assert snapshot.path(found.number) == path
    assert (snapshot.files, snapshot.directories) == (1, 300)


def test_lookups_of_what_is_not_there(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(b"d/f")])
    assert snapshot.find_path(b"d/g") is None
    assert snapshot.find_path(b"d/f/x") is None
    assert snapshot.find_path(b"x/f") is None
    assert snapshot.lookup(ROOT, b"") is None
    with pytest.raises(NotFound, match="entry 3"):
        snapshot.entry(3)
    with pytest.raises(NotFound, match="directory"):
        snapshot.size_and_content(1)


def test_walk_of_a_part(tmp_path: Path) -> None:
    snapshot = built(tmp_path, [listed(key) for key in (b"a/1", b"a/b/2", b"a/b/c/3", b"b/4", b"5")])

    def below(path: bytes) -> list[bytes]:
        top = snapshot.find_path(path)
        assert top is not None
        return [snapshot.path(entry.number) for entry in snapshot.walk_files(top)]

    assert below(b"a") == [b"a/1", b"a/b/2", b"a/b/c/3"]
    assert below(b"a/b/c") == [b"a/b/c/3"]
    assert below(b"b/4") == [b"b/4"]
    assert below(b"") == [b"5", b"a/1", b"b/4", b"a/b/2", b"a/b/c/3"]


def test_compare(tmp_path: Path) -> None:
    old = built(
        tmp_path, [listed(key) for key in (b"same", b"gone", b"d/changed", b"d/x/kept", b"becomes/dir", b"file")]
    )
    new = built(
        tmp_path,
        [listed(b"same", mtime_ns=99), listed(b"d/changed", version=b"v2"), listed(b"d/x/kept"), listed(b"becomes"),
         listed(b"file/below"), listed(b"new/1"), listed(b"new/2")],
    )  # fmt: skip
    diff = compare_snapshots(old, new)
    assert (diff.added, diff.changed, diff.removed, diff.unchanged) == (4, 1, 3, 2)
    same = compare_snapshots(new, new)
    assert (same.added, same.changed, same.removed, same.unchanged) == (0, 0, 0, 7)


def test_every_flipped_byte_is_noticed_by_verify(tmp_path: Path) -> None:
    path = build_snapshot_file(
        [listed(b"d/%d" % number) for number in range(50)], "s3://b", BLOCK_SIZE, identity, tmp_path
    )
    verify(path)
    whole = path.read_bytes()
    for position in random.Random(2).sample(range(len(whole)), 200):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x40]) + whole[position + 1 :])
        with pytest.raises(SnapshotDamaged, match="refresh the dataset"):
            verify(path)


@pytest.mark.parametrize("length", [0, 10, 4096, -1, -4096])
def test_a_truncated_file_does_not_open(tmp_path: Path, length: int) -> None:
    path = build_snapshot_file([listed(b"a")], "s3://b", BLOCK_SIZE, identity, tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(SnapshotDamaged, match=str(path)):
        Snapshot(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="absent"):
        Snapshot(tmp_path / "absent.snapshot")


def test_a_damaged_record_is_an_error_and_never_another_file(tmp_path: Path) -> None:
    """Flip each byte of each name, size and content id in the file: every answer is the true one or an error."""
    objects = [listed(b"directory/file-%02d" % number, size=1000 + number) for number in range(20)]
    path = build_snapshot_file(objects, "s3://b", BLOCK_SIZE, identity, tmp_path)
    true = {found.key: found.size for found in objects}
    whole = bytearray(path.read_bytes())
    content = content_id(identity(b"directory/file-07"), b"v1", 1007, BLOCK_SIZE)
    # Of the three places that name the file one is the hint, whose loss must not hide it.
    starts = [whole.find(content), *_all_of(whole, b"file-07"), whole.find((1007).to_bytes(8, "little") + content)]
    outcomes = set()
    for position in [start + offset for start in starts for offset in range(7)]:
        damaged = bytearray(whole)
        damaged[position] ^= 0x01
        path.write_bytes(damaged)
        snapshot = Snapshot(path)
        for key, size in true.items():
            try:
                found = snapshot.find_path(key)
                assert found is not None
                assert (found.size, snapshot.size_and_content(found.number)[0]) == (size, size)
                outcomes.add("right")
            except SnapshotDamaged:
                outcomes.add("error")
        try:
            assert [entry.size for entry in snapshot.walk_files(snapshot.entry(ROOT))] == list(true.values())
        except SnapshotDamaged:
            outcomes.add("error in listing")
        snapshot.close()
    assert outcomes == {"right", "error", "error in listing"}


def _all_of(data: bytes | bytearray, part: bytes) -> list[int]:
    found, start = [], data.find(part)
    while start >= 0:
        found.append(start)
        start = data.find(part, start + 1)
    return found


def test_nothing_is_left_behind_by_a_failed_build(tmp_path: Path) -> None:
    def failing_identity(key: bytes) -> bytes:
        raise RuntimeError(key)

    with pytest.raises(RuntimeError):
        build_snapshot_file([listed(b"a")], "s3://b", BLOCK_SIZE, failing_identity, tmp_path)
    assert list(tmp_path.iterdir()) == []
