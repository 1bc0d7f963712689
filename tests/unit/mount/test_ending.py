"""How a mount without root sees that it is used, while it ends."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.mount import device, ending, kernel
from cachefs.mount.ending import QUIET_WATCHES, Ending
from cachefs.mount_table import MountPoint


@pytest.mark.parametrize(("shielded", "forgotten"), [(None, [7]), (57, [])])
def test_names_are_not_forgotten_below_a_shield(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shielded: int | None, forgotten: list[int]
) -> None:
    """overlayfs would answer ESTALE to a program that reads the mount."""
    told: list[int] = []
    monkeypatch.setattr(device, "forget_names", told.append)
    monkeypatch.setattr(ending, "mount_seen_at", lambda path: MountPoint(path, "0:58", "cachefs:one", shielded))
    monkeypatch.setattr(ending, "_listen_to_signals", lambda: -1)
    mount = SimpleNamespace(directory=tmp_path)
    made = Ending(mount, 7, SimpleNamespace())  # type: ignore[arg-type]
    os.write(made._writer, b"opens cannot be watched\n")
    made._look_for_uses((1,))
    assert told == forgotten


def test_a_signal_right_after_the_first_one_does_not_end_the_grace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel tells of a parent's death once for each thread that the parent had."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    clock = [100.0]
    monkeypatch.setattr(ending, "_listen_to_signals", lambda: reader)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    told_to_end = os.eventfd(0, os.EFD_NONBLOCK)
    mount = SimpleNamespace(directory=tmp_path, options=SimpleNamespace(grace=30.0), told_to_end=told_to_end)
    made = Ending(mount, 7, SimpleNamespace())  # type: ignore[arg-type]
    assert not made.is_told()
    deadlines = []
    for clock[0] in (100.0, 100.5, 102.0):
        os.write(writer, bytes([signal.SIGTERM]))
        assert made.is_told()
        deadlines.append(made._deadline)
    assert deadlines == [130.0, 130.0, 102.0]
    assert os.eventfd_read(told_to_end) == 1  # the workers tell the daemon


def test_a_mount_is_unmounted_after_watches_that_saw_no_use_however_much_time_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A watching process that gets no processor has seen nothing."""
    clock, unmounted = [100.0], []
    monkeypatch.setattr(ending, "_listen_to_signals", lambda: -1)
    monkeypatch.setattr(Ending, "_tend_watcher", lambda _: None)
    monkeypatch.setattr(kernel, "unmount", unmounted.append)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    mount = SimpleNamespace(directory=tmp_path)
    made = Ending(mount, 7, SimpleNamespace(is_seen=True))  # type: ignore[arg-type]
    made._deadline = 1000.0
    quiet, used = b"no use was seen\n", b"its files are opened\n"
    for seen in (b"", quiet * (QUIET_WATCHES - 1), used, quiet * (QUIET_WATCHES - 1)):
        os.write(made._writer, seen)
        clock[0] += 100
        assert not made.tend(())
    os.write(made._writer, quiet)
    assert made.tend(())
    assert unmounted == [tmp_path]
