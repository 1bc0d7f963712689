"""Pages of what is in a directory."""

from pathlib import Path

import pytest

from cachefs.errors import NotFound
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.datasets import browsing


def test_a_directory_comes_in_pages_and_a_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsing, "ENTRIES_PER_PAGE", 2)
    objects = [ListedObject(b"d/%d" % number, number, 0, b"v") for number in range(3)]
    objects.append(ListedObject(b"d/e/f", 9, 0, b"v"))
    snapshot = Snapshot(build_snapshot_file(objects, "s3://b", 1 << 20, lambda key: key, tmp_path))
    found = [
        [(one.name, one.directory, one.size) for one in p.entries]
        for p in browsing.directory_pages(snapshot, "s", b"/d/")
    ]
    assert found == [[(b"0", False, 0), (b"1", False, 1)], [(b"2", False, 2), (b"e", True, 0)]]
    [alone] = browsing.directory_pages(snapshot, "s", b"d/2")
    assert [one.name for one in alone.entries] == [b"2"]
    with pytest.raises(NotFound, match="s has no 'd/none'"):
        next(browsing.directory_pages(snapshot, "s", b"d/none"))
    snapshot.close()
