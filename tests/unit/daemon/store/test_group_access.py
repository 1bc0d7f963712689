"""Giving directories to the group whose members may mount. The tests run as root."""

import errno
import os
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_daemon.store import group_access
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig

GROUP = 12345


def store(home: Path) -> StoreConfig:
    for name in ("state", "state/snapshots", "memory"):
        (home / name).mkdir(mode=0o700)
    return StoreConfig(home / "state", 4096, TierConfig(home / "memory", 1 << 20, 1 << 20, "lru"), None)


def test_only_what_mounts_open_and_only_what_is_ours(tmp_path: Path) -> None:
    config = store(tmp_path)
    given = ["state/index-3.lmdb", "state/index-3.lmdb-lock", "state/snapshots/ab.snapshot", "memory/00000001.seg"]
    others = ["state/datasets.json", "state/index-notes", "memory/notes", "memory/00000002.seg"]
    for name in (*given, *others):
        (tmp_path / name).touch()
    os.chown(tmp_path / "memory/00000002.seg", 4321, 0)
    (tmp_path / "memory/00000003.seg").symlink_to(tmp_path / "state/datasets.json")
    os.mkfifo(tmp_path / "memory/00000004.seg")
    group_access.give_to_group(config, GROUP)
    group_access.give_to_group(config, GROUP)
    for name in ("state", "state/snapshots", "memory"):
        found = (tmp_path / name).stat()
        assert (found.st_gid, found.st_mode & 0o777) == (GROUP, 0o750)
    assert {name: (tmp_path / name).stat().st_gid for name in given} == dict.fromkeys(given, GROUP)
    assert {name: (tmp_path / name).stat().st_gid for name in others} == dict.fromkeys(others, 0)


def test_what_cannot_be_given_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = store(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(
        ConfigError, match=rf"^state_dir {config.state_dir} cannot be used: daemon\.socket_group .*chgrp"
    ):
        group_access.give_to_group(config, GROUP)
