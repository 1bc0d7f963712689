"""File handles, as a server of NFS keeps them: they stay valid when the dataset is mounted again."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.mounting import mounted

_libc = ctypes.CDLL(None, use_errno=True)


class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("bytes", ctypes.c_ubyte * 128)]


def handle_of(path: Path) -> Handle:
    handle, mount = Handle(128), ctypes.c_int()
    assert not _libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0)
    return handle


def opened(mount: Path, handle: Handle) -> int:
    top = os.open(mount, os.O_RDONLY)
    try:
        fd: int = _libc.open_by_handle_at(top, ctypes.byref(handle), os.O_RDONLY)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        return fd
    finally:
        os.close(top)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tree, other = tmp_path_factory.mktemp("origin"), tmp_path_factory.mktemp("other")
    (tree / "a" / "deep").mkdir(parents=True)
    (tree / "a" / "deep" / "file").write_bytes(b"x")
    (other / "file").write_bytes(b"y")
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        running.add_dataset("tree", f"file://{tree}")
        running.add_dataset("other", f"file://{other}")
        yield running


@pytest.mark.parametrize(("spec", "top"), [("tree", "."), ("tree,other", "tree")])
def test_a_handle_is_good_after_a_remount(daemon: Daemon, tmp_path: Path, spec: str, top: str) -> None:
    with mounted(daemon.socket, spec, tmp_path / "mnt", "no_push") as mount:
        handles = {path: handle_of(mount / top / path) for path in (".", "a", "a/deep", "a/deep/file")}
    with mounted(daemon.socket, spec, tmp_path / "mnt", "no_push") as mount:
        for path in ("a/deep", "a/deep/file", "a", "."):
            fd = opened(mount, handles[path])
            assert os.path.samestat(os.fstat(fd), os.stat(mount / top / path))
            if not path.endswith("file"):
                assert os.readlink(f"/proc/self/fd/{fd}") == os.path.normpath(mount / top / path)
            os.close(fd)
