"""What a mount that is told to end makes of what the watches of its use have seen."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from cachefs.mount import child_process, device, kernel
from cachefs.mount.processes import shutdown
from cachefs.mount.processes.shutdown import QUIET_WATCHES, UNUSED_SECONDS, MountShutdown
from cachefs.mount_table import MountPoint

# What a watch tells: it was told opens or not, and how the mount was used.
QUIET = b"w"
USED = b"wits files are opened"
UNWATCHED = b"u"


@pytest.mark.parametrize(("shielded", "forgotten"), [(None, [7]), (57, [])])
def test_names_are_not_forgotten_below_a_shield(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shielded: int | None, forgotten: list[int]
) -> None:
    """overlayfs would answer ESTALE to a program that reads the mount."""
    told: list[int] = []
    monkeypatch.setattr(device, "invalidate_names", told.append)
    monkeypatch.setattr(shutdown, "find_mount_point", lambda path: MountPoint(path, "0:58", "cachefs:one", shielded))
    monkeypatch.setattr(shutdown, "_listen_to_signals", lambda: -1)
    mount = SimpleNamespace(directory=tmp_path)
    made = MountShutdown(mount, 7, SimpleNamespace())  # type: ignore[arg-type]
    os.write(made._writer, UNWATCHED)
    made._read_watches((1,))
    assert told == forgotten


def test_a_signal_right_after_the_first_one_does_not_end_the_grace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel tells of a parent's death once for each thread that the parent had."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    clock = [100.0]
    monkeypatch.setattr(shutdown, "_listen_to_signals", lambda: reader)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    end_request = os.eventfd(0, os.EFD_NONBLOCK)
    mount = SimpleNamespace(directory=tmp_path, options=SimpleNamespace(grace=30.0), end_request=end_request)
    made = MountShutdown(mount, 7, SimpleNamespace(is_visible=False))  # type: ignore[arg-type]
    assert not made.check_signals()
    deadlines = []
    for clock[0] in (100.0, 100.5, 102.0):
        os.write(writer, bytes([signal.SIGTERM]))
        assert made.check_signals()
        deadlines.append(made._deadline)
    assert deadlines == [130.0, 130.0, 102.0]
    assert os.eventfd_read(end_request) == 1  # the workers tell the daemon


@dataclass
class Ended:
    """A mount that was told to end at 100 s with a grace of 5 s, and that a test watches in place of its watcher."""

    ending: MountShutdown
    clock: list[float]
    unmounted: list[Path]

    def tend(self, now: float, *seen: bytes) -> bool:
        self.clock[0] = now
        for message in seen:
            os.write(self.ending._writer, message)
        return self.ending.advance_shutdown(())


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ended]:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    clock: list[float] = [100.0]
    unmounted: list[Path] = []
    monkeypatch.setattr(shutdown, "_listen_to_signals", lambda: reader)
    monkeypatch.setattr(shutdown, "describe_users", lambda _: "")
    monkeypatch.setattr(child_process, "fork", lambda *_: os.posix_spawnp("sleep", ["sleep", "600"], os.environ))
    monkeypatch.setattr(kernel, "unmount", unmounted.append)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    end_request = os.eventfd(0, os.EFD_NONBLOCK)
    mount = SimpleNamespace(directory=tmp_path, options=SimpleNamespace(grace=5.0), end_request=end_request)
    made = MountShutdown(mount, 7, SimpleNamespace(is_visible=True))  # type: ignore[arg-type]
    os.write(writer, bytes([signal.SIGTERM]))
    assert made.check_signals()
    yield Ended(made, clock, unmounted)
    made.kill_watcher()


def test_the_first_signal_starts_the_watches(ended: Ended) -> None:
    assert ended.ending._watcher is not None


def test_a_mount_is_unmounted_after_watches_that_saw_no_use_however_much_time_passes(
    ended: Ended, tmp_path: Path
) -> None:
    """A watching process that gets no processor has seen nothing."""
    ended.ending._deadline = 1000.0
    few = [QUIET] * (QUIET_WATCHES - 1)
    assert not ended.tend(200)
    assert not ended.tend(300, *few)
    assert not ended.tend(400, USED)
    assert not ended.tend(500, *few)
    assert ended.tend(600, QUIET)
    assert ended.unmounted == [tmp_path]


def test_a_mount_that_was_not_seen_to_be_used_is_watched_on_beyond_the_grace(ended: Ended, tmp_path: Path) -> None:
    assert not ended.tend(105, *[QUIET] * (QUIET_WATCHES - 1))
    assert not ended.tend(104.9 + UNUSED_SECONDS)
    assert ended.tend(104.9 + UNUSED_SECONDS, QUIET)
    assert ended.unmounted == [tmp_path]


def test_a_mount_that_was_seen_to_be_used_ends_with_the_grace(ended: Ended) -> None:
    assert not ended.tend(101, USED, QUIET)
    assert ended.tend(105)
    assert ended.unmounted == []


def test_a_mount_that_is_watched_in_vain_ends_some_seconds_after_the_grace(ended: Ended) -> None:
    assert not ended.tend(104.9 + UNUSED_SECONDS)
    assert ended.tend(105.1 + UNUSED_SECONDS)
    assert ended.unmounted == []


def test_watches_count_anew_after_a_watching_process_that_has_ended(ended: Ended) -> None:
    """It may have seen a use that it has not told."""
    few = [QUIET] * (QUIET_WATCHES - 1)
    assert not ended.tend(101, *few)
    assert ended.ending._watcher is not None
    os.kill(ended.ending._watcher, signal.SIGKILL)
    os.waitid(os.P_PID, ended.ending._watcher, os.WEXITED | os.WNOWAIT)
    assert not ended.tend(102)
    assert not ended.tend(103, *few)
    assert ended.tend(104, QUIET)


def test_no_watch_is_lost_while_the_supervisor_does_nothing(ended: Ended) -> None:
    """The watching process waits then."""
    said = [*[QUIET] * 100, USED]
    watches = Thread(target=lambda: [os.write(ended.ending._writer, message) for message in said])
    watches.start()
    while watches.is_alive():
        ended.ending._read_watches(())
    ended.ending._read_watches(())
    assert ended.ending._last_use == "its files are opened"
    assert ended.ending._quiet_watches == 0


def test_a_watch_that_is_told_no_opens_says_so_each_time(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then lookups count as uses."""
    monkeypatch.setattr(shutdown, "find_mount_point", lambda _: None)
    assert not ended.tend(101, QUIET)
    for number in (1, 2):
        os.write(ended.ending._writer, UNWATCHED)
        assert not ended.ending.advance_shutdown((number,))
    assert ended.ending._last_use == "its files are looked up or read"
