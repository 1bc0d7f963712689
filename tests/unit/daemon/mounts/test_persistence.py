"""What of the mounts outlives the daemon."""

import asyncio
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachefs.messages import MountReport
from cachefs_daemon.datasets.records import SnapshotRecord
from cachefs_daemon.mounts.persistence import FILE_NAME, MountPersistence
from cachefs_daemon.mounts.registry import MountRecord, MountRegistry
from cachefs_daemon.runtime import autosave as keeping
from cachefs_daemon.runtime.boot_clock import BootMoment, birth_of
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def reported(*pids: int) -> MountRegistry:
    mounts = MountRegistry()
    for pid in pids:
        mounts.add_report(MountReport(id=f"m{pid}", mountpoint=f"/nowhere/{pid}", spec="images", pid=pid))
    return mounts


def own_birth() -> BootMoment:
    born = birth_of(os.getpid())
    assert born is not None
    return born


def save(mounts: MountRegistry, directory: Path, threads: Threads) -> None:
    virtual_time.run(MountPersistence(mounts, directory, threads).save())


def restored(directory: Path, threads: Threads) -> MountRegistry:
    mounts = MountRegistry()
    virtual_time.run(MountPersistence(mounts, directory, threads).restore())
    return mounts


def test_mounts_whose_process_lives_are_known_again(tmp_path: Path, threads: Threads) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        save(reported(os.getpid(), sleeping.pid), tmp_path, threads)
        sleeping.kill()
    mounts = restored(tmp_path, threads)
    assert [(view.mountpoint, view.alive) for view in mounts.views()] == [(f"/nowhere/{os.getpid()}", True)]
    assert mounts.mount_of("images") is not None
    born = own_birth()
    assert mounts.may_read(SnapshotRecord("3f9c", born.seconds + 1, born.boot))
    assert not mounts.may_read(SnapshotRecord("3f9c", 1.0, born.boot))
    save(mounts, tmp_path, threads)
    assert [record.pid for record in records(tmp_path)] == [os.getpid()]


def test_a_process_that_took_over_the_pid_is_no_mount(tmp_path: Path, threads: Threads) -> None:
    born = own_birth().after(-60)
    record = MountRecord("m", "/nowhere", "images", os.getpid(), born)
    (tmp_path / FILE_NAME).write_bytes(msgspec.json.encode([record]))
    assert restored(tmp_path, threads).views() == []


def test_counters_begin_with_the_first_report(tmp_path: Path, threads: Threads) -> None:
    save(reported(os.getpid()), tmp_path, threads)
    mounts = restored(tmp_path, threads)
    counters = {"hits_memory": 7}
    known = mounts.views()[0]
    for closing in (False, True):
        mounts.add_report(MountReport(known.id, known.mountpoint, known.spec, known.pid, counters, closing=closing))
        assert mounts.counters() == counters
    assert mounts.views() == []


def test_the_file_follows_what_comes_and_goes(tmp_path: Path, threads: Threads) -> None:
    mounts = reported(os.getpid())
    save(mounts, tmp_path, threads)
    path = tmp_path / FILE_NAME
    written = path.stat().st_ino
    mounts.add_report(MountReport(id=f"m{os.getpid()}", mountpoint="/nowhere", spec="images", pid=os.getpid()))
    save(mounts, tmp_path, threads)
    assert path.stat().st_ino == written
    mounts.add_report(MountReport(f"m{os.getpid()}", "/nowhere", "images", os.getpid(), closing=True))
    save(mounts, tmp_path, threads)
    assert records(tmp_path) == []
    assert os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize("content", [b"", b'[{"id": "m"', b'[{"id": 1}]', b"\xff\xfe", b'["\xff"]'])
def test_a_damaged_file_is_ignored(
    tmp_path: Path, threads: Threads, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert restored(tmp_path, threads).views() == []
    assert f"{tmp_path / FILE_NAME} cannot be used" in caplog.text


def test_what_could_not_be_written_is_tried_again(tmp_path: Path, threads: Threads) -> None:
    mounts = reported(os.getpid())
    state = tmp_path / "state"
    with pytest.raises(FileNotFoundError):
        save(mounts, state, threads)
    state.mkdir()
    save(mounts, state, threads)
    assert len(records(state)) == 1


class FullDisk(Threads):
    """Becomes free with the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.written = asyncio.Event()

    async def background(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        await super().background(work, *args, **kwargs)
        self.written.set()


def test_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAVE_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(keeping, name, 0.0)

    async def run() -> None:
        disk = FullDisk()
        running = asyncio.create_task(MountPersistence(reported(os.getpid()), tmp_path, disk).run())
        await asyncio.wait_for(disk.written.wait(), 20)
        running.cancel()
        disk.close()

    virtual_time.run(run())
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]
    assert len(records(tmp_path)) == 1


def records(directory: Path) -> list[MountRecord]:
    return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=list[MountRecord])
