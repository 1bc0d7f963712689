"""The file of a bundle is its owner's only, and whole or not there."""

import os
import stat
import tarfile
from pathlib import Path

import pytest

from cachefs.errors import AlreadyExists, CachefsError
from cachefs_tools.debug_bundle import bundle


def test_it_is_for_its_owner_only_and_has_everything(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        bundle.write_archive(tmp_path / "b.tar.gz", "top", {"a.txt": "text \udcff", "b.json": "{}"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        assert tar.getnames() == ["top/a.txt", "top/b.json"]
        file = tar.extractfile("top/a.txt")
        assert file is not None
        assert file.read() == b"text \\udcff"
    assert os.listdir(tmp_path) == ["b.tar.gz"]


def test_it_replaces_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("mine")
    with pytest.raises(AlreadyExists, match="-o"):
        bundle.write_archive(tmp_path / "b", "top", {})
    assert os.listdir(tmp_path) == ["b"]
    assert (tmp_path / "b").read_text() == "mine"
    with pytest.raises(CachefsError, match="cannot be written"):
        bundle.write_archive(tmp_path / "no/b", "top", {})
