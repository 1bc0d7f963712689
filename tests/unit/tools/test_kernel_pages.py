"""Pages that are dropped are gone, and are known to be."""

import mmap
from pathlib import Path

import psutil
import pytest

from cachefs_tools.kernel_pages import PAGE, drop_pages, resident_bytes


def _file_system_of(directory: Path) -> str:
    above = [one for one in psutil.disk_partitions(all=True) if directory.is_relative_to(one.mountpoint)]
    return str(max(above, key=lambda one: len(one.mountpoint)).fstype)


def test_dropped_pages_are_gone(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(5 * PAGE))
        with path.open("rb+") as file:
            mmap.mmap(file.fileno(), 0).flush()
    if _file_system_of(tmp_path) in ("tmpfs", "overlay"):
        pytest.skip("tmpfs keeps its files in pages, and overlayfs keeps pages elsewhere")
    assert resident_bytes(paths) == 3 * 5 * PAGE
    drop_pages(paths)
    assert resident_bytes(paths) == 0


def test_pages_that_the_kernel_keeps_do_not_keep_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(PAGE))
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as pages:
        assert pages[0] == 0
        pages.flush()
        drop_pages([path])
