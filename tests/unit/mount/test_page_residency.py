"""Which pages the kernel has, on kernels without cachestat too."""

import os
from pathlib import Path

import pytest

from cachefs.mount import page_residency
from cachefs.mount.page_residency import PAGE, resident_pages


@pytest.mark.parametrize("number", [page_residency._CACHESTAT, 100_000], ids=["cachestat", "mincore"])
def test_pages_are_counted_by_either_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(page_residency, "_CACHESTAT", number)
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    with path.open("rb") as file:
        # Dirty pages are not taken back: all are there, whatever else runs on the machine.
        assert resident_pages(file.fileno(), 0, 8 * PAGE) == 8
        assert resident_pages(file.fileno(), 4 * PAGE, 2 * PAGE) == 2


def test_nothing_is_said_where_the_kernel_would_not_tell_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mincore tells others than the owner of a file and root that all pages are there."""
    monkeypatch.setattr(page_residency, "_CACHESTAT", 100_000)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file, pytest.raises(OSError, match="not implemented"):
        resident_pages(file.fileno(), 0, PAGE)
