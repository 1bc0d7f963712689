"""What the kernel's table of mounts says: which lines are ours, and names with odd characters."""

from pathlib import Path

import pytest

from cachefs import mount_table
from cachefs.mount_table import MountPoint, daemon_sockets, mount_points, mount_source, mounted_paths, resolve_locally

TABLE = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/root rw
31 22 0:57 / /mnt/with\040space\134 ro,nosuid,nodev shared:1 master:2 - fuse.cachefs cachefs:one,two@3f9c ro,user_id=0
32 22 0:58 / /mnt/other ro - fuse.sshfs cachefs:no ro
33 22 0:59 / /mnt/%b rw - tmpfs  rw
""" % "\u00fc".encode()


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_bytes(TABLE)
    monkeypatch.setattr(mount_table, "_TABLE", tmp_path / "mountinfo")


def test_mounts_of_ours_are_found_with_what_they_show() -> None:
    (found,) = mount_points()
    assert found == MountPoint(Path("/mnt/with space\\"), "0:57", "cachefs:one,two@3f9c")
    assert found.connection == 57
    assert found.spec == "one,two@3f9c"
    assert mount_source(found.spec) == found.source


def test_names_may_have_white_space_that_the_kernel_does_not_escape(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(b"31 22 0:57 / /mnt/a\rb\x0cc ro - fuse.cachefs cachefs:one ro\n")
    assert mount_points() == [MountPoint(Path("/mnt/a\rb\x0cc"), "0:57", "cachefs:one")]


def test_whatever_is_mounted_has_a_path() -> None:
    assert mounted_paths() == {"/", "/mnt/with space\\", "/mnt/other", "/mnt/\u00fc"}


def test_a_mount_behind_a_shield_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        b"50 27 0:43 / /data ro,nosuid - overlay cachefs:one ro,lowerdir=.::/sys/class/bdi/0\\134:42,redirect_dir=on\n"
        b"51 27 0:44 / /other rw - overlay cachefs:other rw,lowerdir=/a:/b\n"
        b"52 27 0:45 / /docker rw - overlay overlay rw,lowerdir=.::/sys/class/bdi/0\\134:42\n"
    )
    (tmp_path / "mountinfo").write_bytes(table)
    monkeypatch.setattr(mount_table, "_TABLE", tmp_path / "mountinfo")
    (found,) = mount_points()
    assert (found.path, found.spec, found.device) == (Path("/data"), "one", "0:43")
    assert found.connection == found.shielded_connection == 42


def test_command_lines_tell_which_daemon_a_mount_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {
        "1": (b"python", b"-m", b"cachefs.mount", b"a", b"/mnt/a", b"-o", b"log=/x,socket=/run/one"),
        "2": (b"python", b"/usr/sbin/mount.cachefs", b"--", b"b", b"/mnt/b"),
        "3": (b"vi", b"/mnt/c", b"socket=/run/two"),
        "4": (b"python", b"/usr/sbin/mount.cachefs", b"d", b"/mnt/d"),
    }
    for pid, words in lines.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(b"\0".join(words) + b"\0")
    (tmp_path / "2" / "environ").write_bytes(b"A=b\0CACHEFS_SOCKET=/run/three\0")
    monkeypatch.setattr(mount_table, "_PROCESSES", tmp_path)
    assert daemon_sockets() == {Path("/mnt/a"): "/run/one", Path("/mnt/b"): "/run/three", Path("/mnt/d"): ""}


def test_a_path_is_resolved_without_asking_a_mount_that_may_hang(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(
        f"22 1 254:0 / / rw - ext4 /dev/root rw\n31 22 0:57 / {tmp_path}/far ro - fuse.sshfs server: ro\n"
        f"32 22 0:58 / {tmp_path}/shield ro - overlay cachefs:one ro,lowerdir=.::/sys/class/bdi/0\\134:57\n"
    )
    for name in ("far", "shield", "near"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        (tmp_path / f"to-{name}").symlink_to(f"near/../{name}")
    (tmp_path / "loop").symlink_to("loop")
    assert resolve_locally(f"{tmp_path}/to-near/../near/./file") == f"{tmp_path}/near/file"
    for refused in ("far/file", "to-far/file", "to-shield/file", "near/../far", "loop", "nothing"):
        with pytest.raises(OSError, match=r"local|many|No such"):
            resolve_locally(str(tmp_path / refused))
