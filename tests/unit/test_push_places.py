"""Bytes must never get into the pages of another file, whatever snapshots a mount and a daemon have."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.mount.namespace import ENTRY_BITS
from cachefs.mount.push import places
from cachefs.mount.push.places import Places
from tests.unit.test_namespace import dataset


def test_a_mount_at_one_snapshot_shows_no_other_whose_slot_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = dataset(tmp_path, "one", b"a"), dataset(tmp_path, "one", b"a", b"b")
    other = dataset(tmp_path, "two", b"c")
    monkeypatch.setattr(places, "slot_of", {old.snapshot: 100, new.snapshot: 99}.__getitem__)
    shown = SimpleNamespace(st_ino=100 << ENTRY_BITS | 1)
    stat = SimpleNamespace(stat=lambda path, **_: shown, fsencode=os.fsencode, fsdecode=os.fsdecode)
    monkeypatch.setattr(places, "os", stat)
    found = Places(f"one@{old.snapshot}", tmp_path, lambda: [new, other])
    assert found.find(new.snapshot) is None
    place = found.find(old.snapshot)
    assert place is not None
    assert place.inode(1) == shown.st_ino
