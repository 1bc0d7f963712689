"""`cachectl umount` of a mount that is busy for a moment, or all the time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.errors import Busy
from cachefs_tools.cachectl import mount_points


def busy(times: int) -> Callable[..., None]:
    left = iter(range(times))

    def unmount(path: Path, *, lazy: bool) -> None:
        for _ in left:
            raise Busy(f"cannot unmount {path}: target is busy")

    return unmount


def test_a_mount_that_is_busy_for_a_moment_is_unmounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_points.kernel, "unmount", busy(3))
    mount_points.unmount(Path("/mnt"), lazy=False)


def test_a_mount_that_stays_busy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_points, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(mount_points.kernel, "unmount", busy(10**9))
    with pytest.raises(Busy):
        mount_points.unmount(Path("/mnt"), lazy=False)
