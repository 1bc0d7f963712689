"""Directories that a daemon trusts: its own, that nobody else can write to. The tests run as root."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_daemon.store import owned_directory
from cachefs_daemon.store.owned_directory import ConfiguredDirectory, open_owned

NOBODY = 65534


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """As the daemon has it."""
    before = os.umask(0o007)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refusal(path: Path) -> str:
    """Why the directory is refused, which a check says too without making anything."""
    with pytest.raises(ConfigError) as refused:
        open_owned(ConfiguredDirectory("[memory] dir", path))
    assert list(owned_directory.problems(ConfiguredDirectory("[memory] dir", path))) == [str(refused.value)]
    assert str(refused.value).startswith(f"[memory] dir {path} cannot be used: ")
    return str(refused.value)


def test_it_is_made_for_us_and_for_our_group_to_read(tmp_path: Path) -> None:
    place = ConfiguredDirectory("[memory] dir", tmp_path / "tier")
    assert list(owned_directory.problems(place)) == []
    assert not place.path.exists()
    os.close(open_owned(place))
    assert mode_of(place.path) == 0o750


def test_a_directory_of_somebody_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir(mode=0o700)
    os.chown(tmp_path / "tier", NOBODY, NOBODY)
    assert "belongs to user nobody (65534)" in refusal(tmp_path / "tier")
    place = ConfiguredDirectory("[memory] dir", tmp_path / "tier")
    assert list(owned_directory.problems(place, any_owner=True)) == [], "root checks for a daemon of another user"


def test_a_directory_that_everybody_may_write_to_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o1777)
    assert "any user may write to it (mode 1777); choose a new directory in it" in refusal(tmp_path / "shm")
    assert mode_of(tmp_path / "shm") == 0o1777
    os.close(open_owned(ConfiguredDirectory("[memory] dir", tmp_path / "shm/cachefs")))


def test_the_group_loses_its_right_to_write(tmp_path: Path) -> None:
    """Earlier versions made directories so."""
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier").chmod(0o2770)
    os.close(open_owned(ConfiguredDirectory("[ssd] dir", tmp_path / "tier")))
    assert mode_of(tmp_path / "tier") == 0o2750


def test_links_of_root_are_followed_and_those_of_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("disk")
    descriptor = open_owned(ConfiguredDirectory("[ssd] dir", tmp_path / "link"))
    assert os.path.samestat(os.fstat(descriptor), (tmp_path / "disk").stat())
    os.close(descriptor)
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert "it is a symbolic link of user nobody" in refusal(tmp_path / "link")


def test_what_is_no_directory_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(tmp_path / "file")
    assert f"{tmp_path}/a does not exist (is its disk mounted?)" in refusal(tmp_path / "a/b")
    assert not (tmp_path / "a").exists()


def test_a_disk_that_must_be_mounted(tmp_path: Path) -> None:
    place = ConfiguredDirectory("[ssd] dir", tmp_path / "tier", required_mount=tmp_path)
    with pytest.raises(ConfigError, match=f"nothing is mounted on {tmp_path}"):
        open_owned(place)
    assert not (tmp_path / "tier").exists()
    os.close(open_owned(ConfiguredDirectory("[ssd] dir", tmp_path / "tier", required_mount=Path("/proc"))))
