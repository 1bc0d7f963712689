"""No path leads out of a directory, with openat2 and without it."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cachefs_daemon.origin.beneath import has_openat2, open_beneath, walk_beneath

Open = Callable[[int, bytes, int], int]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    """With files, and with links of all kinds."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "file").write_text("file")
    (root / "sub" / "deep").write_text("deep")
    (tmp_path / "secret").write_text("secret")
    for name, target in {
        "absolute": tmp_path / "secret", "up": "../secret", "tmp": tmp_path, "inside": "sub/deep", "loop": "loop",
        "sub/across": "../file", "out_and_in": "../root/file",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def content(opened: int) -> str:
    with os.fdopen(opened) as file:
        return file.read()


@pytest.mark.parametrize("way", [open_beneath, walk_beneath])
def test_what_is_beneath_is_opened(directory: int, way: Open) -> None:
    assert content(way(directory, b"file", os.O_RDONLY)) == "file"
    assert content(way(directory, b"sub/deep", os.O_RDONLY)) == "deep"
    os.close(way(directory, b"sub/", os.O_RDONLY | os.O_DIRECTORY))
    with pytest.raises(FileNotFoundError):
        way(directory, b"sub/none", os.O_RDONLY)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
@pytest.mark.parametrize("path", [b"absolute", b"up", b"tmp/secret", b"../secret", b"sub/../../secret", b"out_and_in"])
@pytest.mark.parametrize("way", [open_beneath, walk_beneath])
def test_nothing_leads_out(directory: int, way: Open, path: bytes, flags: int) -> None:
    with pytest.raises(OSError, match=r"link|name") as raised:
        os.close(way(directory, path, flags))
    assert raised.value.errno == errno.EXDEV


def test_links_that_stay_beneath_are_followed(directory: int) -> None:
    assert has_openat2()
    assert content(open_beneath(directory, b"inside", os.O_RDONLY)) == "deep"
    assert content(open_beneath(directory, b"sub/across", os.O_RDONLY)) == "file"
    with pytest.raises(OSError, match="symbolic links") as raised:
        open_beneath(directory, b"loop", os.O_RDONLY)
    assert raised.value.errno == errno.ELOOP


def test_without_openat2_no_link_is_followed(directory: int) -> None:
    for path in (b"inside", b"sub/across", b"loop"):
        with pytest.raises(OSError, match="link"):
            walk_beneath(directory, path, os.O_RDONLY)
