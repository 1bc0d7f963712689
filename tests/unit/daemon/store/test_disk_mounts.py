"""Disks that should be mounted and are not."""

from pathlib import Path

import pytest

from cachefs_daemon.store.owned_directory import is_mounted, missing_mount


@pytest.fixture
def fstab(tmp_path: Path) -> Path:
    path = tmp_path / "fstab"
    path.write_text(
        "# a comment\n\n/dev/sda1 / ext4 defaults 0 1\n/dev/sdb none swap sw 0 0\nproc /proc proc defaults 0 0\n"
        f"LABEL=x {tmp_path}/nvme\\0400/ xfs nofail 0 2\nbroken\n"
    )
    return path


def test_a_mount_point_of_fstab_above_a_directory_must_be_mounted(tmp_path: Path, fstab: Path) -> None:
    disk = tmp_path / "nvme 0"
    assert missing_mount(disk, fstab) == disk
    assert missing_mount(disk / "a/b", fstab) == disk
    assert missing_mount(tmp_path / "nvme", fstab) is None
    assert missing_mount(tmp_path / "other", fstab) is None
    assert missing_mount(Path("/proc/self"), fstab) is None
    assert missing_mount(disk, tmp_path / "no such file") is None


def test_a_link_to_a_disk_that_is_not_mounted_is_seen_through(tmp_path: Path, fstab: Path) -> None:
    (tmp_path / "link").symlink_to("nvme 0")
    assert missing_mount(tmp_path / "link/tier", fstab) == tmp_path / "nvme 0"


def test_what_is_mounted() -> None:
    assert is_mounted(Path("/proc"))
    assert not is_mounted(Path("/proc/self"))
