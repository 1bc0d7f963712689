"""No path leads out of a directory, with openat2 and without it."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs_daemon.origin.file import confined_open
from cachefs_daemon.origin.file.confined_open import has_openat2, open_confined, walk_confined

Open = Callable[[int, bytes, int], int]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    """With files, and with links of all kinds."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "file").write_text("file")
    (root / "sub" / "deep").write_text("deep")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "file").write_text("secret")
    for name, target in {
        "absolute": tmp_path / "secret", "up": "../secret", "tmp": tmp_path, "inside": "sub/deep", "loop": "loop",
        "sub/across": "../file", "out_and_in": "../root/file", "back": root / "sub" / "deep", "directory": root / "sub",
        "chain": "back", "beside": f"{root}2/file", "dots": f"{root}/../secret", "itself": root,
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def content(opened: int) -> str:
    with os.fdopen(opened) as file:
        return file.read()


def without_openat2(directory: int, path: bytes, flags: int) -> int:
    """As on an old kernel, or in a sandbox."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confined_open, "has_openat2", lambda: False)
        return open_confined(directory, path, flags)


@pytest.mark.parametrize("way", [open_confined, without_openat2, walk_confined])
def test_what_is_beneath_is_opened(directory: int, way: Open) -> None:
    assert content(way(directory, b"file", os.O_RDONLY)) == "file"
    assert content(way(directory, b"sub/deep", os.O_RDONLY)) == "deep"
    os.close(way(directory, b"sub/", os.O_RDONLY | os.O_DIRECTORY))
    with pytest.raises(FileNotFoundError):
        way(directory, b"sub/none", os.O_RDONLY)


OUT = [
    b"absolute", b"up", b"tmp/secret", b"../secret", b"sub/../../secret", b"beside", b"dots", b"itself",
    b"tmp/root2/file",
]  # fmt: skip


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
@pytest.mark.parametrize("path", OUT)
@pytest.mark.parametrize("way", [open_confined, without_openat2, walk_confined])
def test_nothing_leads_out(directory: int, way: Open, path: bytes, flags: int) -> None:
    with pytest.raises(OSError, match=r"link|name") as raised:
        os.close(way(directory, path, flags))
    assert raised.value.errno == errno.EXDEV


def test_links_that_stay_beneath_are_followed(directory: int) -> None:
    assert has_openat2()
    assert content(open_confined(directory, b"inside", os.O_RDONLY)) == "deep"
    assert content(open_confined(directory, b"sub/across", os.O_RDONLY)) == "file"
    with pytest.raises(OSError, match="symbolic links") as raised:
        open_confined(directory, b"loop", os.O_RDONLY)
    assert raised.value.errno == errno.ELOOP


@pytest.mark.parametrize("way", [open_confined, without_openat2])
def test_links_that_lead_back_are_followed(directory: int, way: Open) -> None:
    for path in (b"inside", b"back", b"chain", b"directory/deep", b"tmp/root/sub/deep"):
        assert content(way(directory, path, os.O_RDONLY)) == "deep"
    assert content(way(directory, b"out_and_in", os.O_RDONLY)) == "file"


@pytest.mark.parametrize("way", [open_confined, without_openat2])
def test_what_is_exchanged_while_a_link_is_resolved_does_not_lead_out(
    directory: int, way: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = confined_open._resolve_links

    def exchange(directory: int, path: bytes) -> bytes:
        found = resolve(directory, path)
        (tmp_path / "root" / "sub" / "deep").unlink()
        (tmp_path / "root" / "sub" / "deep").symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(confined_open, "_resolve_links", exchange)
    with pytest.raises(OSError, match="link") as raised:
        way(directory, b"back", os.O_RDONLY)
    assert raised.value.errno == errno.EXDEV


def test_to_walk_a_path_follows_no_link(directory: int) -> None:
    for path in (b"inside", b"sub/across", b"loop"):
        with pytest.raises(OSError, match="link"):
            walk_confined(directory, path, os.O_RDONLY)


@pytest.mark.parametrize("way", [open_confined, without_openat2])
@pytest.mark.parametrize("path", OUT)
def test_nothing_outside_is_touched(directory: int, way: Open, path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link into a mount that hangs must not keep a thread."""
    opened = []
    real = os.open

    def note(path: bytes, flags: int, *, dir_fd: int | None = None) -> int:
        fd = real(path, flags, dir_fd=dir_fd)
        opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        return fd

    has_openat2()
    root = os.readlink(f"/proc/self/fd/{directory}")
    monkeypatch.setattr(os, "open", note)
    with pytest.raises(OSError, match=r"link|name"):
        os.close(way(directory, path, os.O_RDONLY))
    assert [one for one in opened if not f"{one}/".startswith(f"{root}/")] == []


@pytest.mark.parametrize("way", [open_confined, without_openat2])
def test_dots_behind_a_link_go_up_from_where_it_leads(directory: int, way: Open, tmp_path: Path) -> None:
    (tmp_path / "root" / "deep").write_text("another")
    (tmp_path / "root" / "dotted").symlink_to(f"{tmp_path}/root/directory/../sub/deep")
    assert content(way(directory, b"dotted", os.O_RDONLY)) == "deep"


def test_links_without_an_end_are_an_error(directory: int) -> None:
    with pytest.raises(OSError, match="symbolic links") as raised:
        without_openat2(directory, b"loop", os.O_RDONLY)
    assert raised.value.errno == errno.ELOOP
