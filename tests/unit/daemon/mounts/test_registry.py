"""What the daemon knows of its mounts."""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cachefs.messages import MountReport, OriginOptions
from cachefs.mount_table import MountPoint
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.mounts import registry
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.runtime.boot_clock import birth_of


def report(name: str, pid: int, spec: str = "images", hits: int = 0, *, closing: bool = False) -> MountReport:
    counters = {"hits_memory": hits}
    return MountReport(id=name, mountpoint=f"/nowhere/{name}", spec=spec, pid=pid, counters=counters, closing=closing)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        yield sleeping
        sleeping.kill()


def test_a_mount_whose_process_ended_is_not_alive(process: subprocess.Popen[bytes]) -> None:
    mounts = MountRegistry()
    mounts.add_report(report("a", process.pid, hits=4))
    assert [view.alive for view in mounts.views()] == [True]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not mounts.is_alive("a"), "a zombie counts as ended"
    assert mounts.views() == []  # nothing is mounted there: an attempt that failed, or an end that is not reported yet
    assert mounts.mount_of("images") is None
    mounts.forget_ended()
    assert mounts.views() == []
    assert mounts.counters()["hits_memory"] == 4


def test_it_is_known_for_how_long_a_mount_has_been_detached(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`dataset rm` waits for a mount that ends, and not for one that goes on for its open files."""
    now = 1000.0
    monkeypatch.setattr(registry.time, "monotonic", lambda: now)
    mounts = MountRegistry()
    seen = [MountPoint(Path("/nowhere/a"), "0:57", "cachefs:images")]
    monkeypatch.setattr(registry, "mount_points_of", lambda pid: seen)
    mounts.add_report(report("a", process.pid))
    assert mounts.seconds_detached("a") == 0
    seen.clear()
    assert mounts.seconds_detached("a") == 0, "it starts"
    mounts.add_report(msgspec.structs.replace(report("a", process.pid), worker_pid=process.pid))
    now += 5
    assert [view.detached for view in mounts.views()] == [True]
    now += 7
    assert mounts.seconds_detached("a") == 7
    assert mounts.seconds_detached("unknown") == 0
    monkeypatch.setattr(registry, "_DEVICES", tmp_path)
    (tmp_path / "0:57").mkdir()
    mounts.add_report(msgspec.structs.replace(report("a", process.pid), worker_pid=process.pid, connection=57))
    assert mounts.seconds_detached("a") == 7
    (tmp_path / "0:57").rmdir()
    assert mounts.seconds_detached("a") == 0, "nothing has it open any more, so it ends"


def test_a_mount_that_was_unmounted_and_lives_on_is_not_the_one_that_is_there_now(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that has begun before the mount was unmounted keeps it."""
    mounts = MountRegistry()
    seen = [MountPoint(Path("/nowhere/a"), "0:58", "cachefs:images")]
    monkeypatch.setattr(registry, "mount_points_of", lambda pid: seen)
    for name, connection in (("first", 57), ("second", 58)):
        own = msgspec.structs.replace(report(name, process.pid), mountpoint="/nowhere/a")
        mounts.add_report(own)
        mounts.take_unsaved()
        mounts.add_report(msgspec.structs.replace(own, worker_pid=process.pid, connection=connection))
        assert mounts.take_unsaved()
    restarted = MountRegistry()
    restarted.restore(mounts.records())
    for each in (mounts, restarted):
        assert {view.id: view.detached for view in each.views()} == {"first": True, "second": False}


def test_a_mount_is_mounted_where_its_process_sees_it(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dataset rm` waits for one that is not: its workers may not have reported yet, and its process may end after the
    mount was found alive."""
    mounts = MountRegistry()
    seen = [MountPoint(Path("/nowhere/a"), "0:57", "cachefs:images")]
    monkeypatch.setattr(registry, "mount_points_of", lambda pid: seen)
    mounts.add_report(report("a", process.pid))
    mounts.add_report(report("unseen", 1 << 30, "texts"))
    assert mounts.is_mounted("a")
    assert mounts.is_mounted("unseen"), "in a container, for all that is known"
    seen.clear()
    assert not mounts.is_mounted("a")
    monkeypatch.undo()
    assert mounts.mount_of("images") is not None
    process.kill()
    process.wait()
    assert not mounts.is_mounted("a")
    mounts.forget_ended()
    assert not mounts.is_mounted("a")


def test_a_mount_whose_process_cannot_be_seen_lives_as_long_as_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = MountRegistry()
    unseen = 1 << 30  # no pid is that high
    for hits in (4, 7):
        mounts.add_report(report("a", unseen, hits=hits))
        mounts.forget_ended()
    assert mounts.mount_of("images") is not None
    assert mounts.may_read(replaced("3f9c", 0))
    assert mounts.counters()["hits_memory"] == 7
    later = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert mounts.mount_of("images") is None
    mounts.forget_ended()
    assert mounts.views() == []
    assert mounts.counters()["hits_memory"] == 7


def mounted_at(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's table has a mount of ours there."""
    point = MountPoint(Path(directory), "0:57", "cachefs:images")
    monkeypatch.setattr(registry, "mount_points", lambda: [point])


def test_an_attempt_that_failed_where_another_mount_lives_is_not_shown(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = MountRegistry()
    mounted_at("/proc", monkeypatch)
    mounts.add_report(MountReport(id="a", mountpoint="/proc", spec="images", pid=os.getpid()))
    mounts.add_report(MountReport(id="b", mountpoint="/proc", spec="nosuch", pid=process.pid))
    process.kill()
    process.wait()
    assert [(view.id, view.alive) for view in mounts.views()] == [("a", True)]


def test_a_dead_mount_point_stays_in_sight_until_it_is_mounted_again(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = MountRegistry()
    mounted_at("/proc", monkeypatch)
    dead = report("a", process.pid, hits=4)
    mounts.add_report(MountReport(id="a", mountpoint="/proc", spec="images", pid=process.pid, counters=dead.counters))
    process.kill()
    process.wait()
    mounts.forget_ended()
    assert [(view.mountpoint, view.alive) for view in mounts.views()] == [("/proc", False)]
    mounts.add_report(MountReport(id="b", mountpoint="/proc", spec="images", pid=os.getpid()))
    assert [(view.id, view.alive) for view in mounts.views()] == [("b", True)]
    assert mounts.counters()["hits_memory"] == 4


@pytest.mark.parametrize(
    ("spec", "uses"),
    [("images", True), ("images@3f9c", True), ("other,images", True), ("all", False), ("imagesx", False), ("x", False)],
)
def test_which_mounts_use_a_dataset(spec: str, uses: bool) -> None:
    mounts = MountRegistry()
    mounts.add_report(report("a", os.getpid(), spec))
    assert (mounts.mount_of("images") is not None) is uses


def test_a_mount_may_use_what_was_current_when_it_started() -> None:
    mounts = MountRegistry()
    assert not mounts.may_read(replaced("3f9c00", 0))
    mounts.add_report(report("a", os.getpid()))
    assert mounts.may_read(replaced("3f9c00", 0))
    assert not mounts.may_read(replaced("3f9c00", -1.0))
    mounts.add_report(report("a", os.getpid(), "images@3f9c"))
    assert mounts.may_read(replaced("3f9c00", -1.0))
    assert not mounts.may_read(replaced("4f9c00", -1.0))


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ("all", {"a2", "b1"}),
        ("images,texts", {"a2", "b1"}),
        ("texts", {"b1"}),
        ("images", {"a2"}),
        ("images@a1", {"a1"}),
        ("others", set()),
    ],
)
def test_a_mount_shows_the_snapshots_its_spec_names(spec: str, shown: set[str]) -> None:
    mounts = MountRegistry()
    mounts.add_report(report("m", os.getpid(), spec))
    datasets = [dataset("images", SnapshotRecord("a2"), replaced("a1", -86400)), dataset("texts", "b1")]
    assert {one for one in ("a1", "a2", "b1") if mounts.shows("m", one, datasets)} == shown
    assert mounts.shows("not reported yet", "a1", datasets)


@pytest.mark.parametrize(("refreshed_after", "shown"), [(60.0, {"a1"}), (1.0, {"a1", "a2"}), (-60.0, {"a2"})])
def test_a_mount_of_one_dataset_stays_at_its_snapshot(refreshed_after: float, shown: set[str]) -> None:
    mounts = MountRegistry()
    mounts.add_report(report("m", os.getpid()))
    datasets = [dataset("images", SnapshotRecord("a2"), replaced("a1", refreshed_after))]
    assert {one for one in ("a1", "a2") if mounts.shows("m", one, datasets)} == shown


def test_a_snapshot_of_an_older_daemon_is_kept_and_not_shown() -> None:
    """It has unix time, which nobody can compare."""
    mounts = MountRegistry()
    mounts.add_report(report("m", os.getpid()))
    old = SnapshotRecord("a1", time.time())
    assert mounts.may_read(old)
    assert not mounts.shows("m", "a1", [dataset("images", "a2", old)])
    assert mounts.shows("m", "a2", [dataset("images", "a2", old)])


def test_what_was_replaced_before_the_machine_started_is_used_by_nobody() -> None:
    mounts = MountRegistry()
    mounts.add_report(report("m", os.getpid()))
    assert not mounts.may_read(SnapshotRecord("a1", 1e9, "another boot"))


def replaced(snapshot: str, after: float) -> SnapshotRecord:
    """Another one became current so many seconds after this process began."""
    born = birth_of(os.getpid())
    assert born is not None
    return SnapshotRecord(snapshot, born.seconds + after, born.boot)


def dataset(name: str, *snapshots: SnapshotRecord | str) -> DatasetRecord:
    records = [SnapshotRecord(one) if isinstance(one, str) else one for one in snapshots]
    return DatasetRecord(name, f"file:///{name}", OriginOptions(), records)


def test_what_a_worker_has_counted_before_a_restart_of_the_daemon_does_not_count_again() -> None:
    def tell(mounts: MountRegistry, worker_pid: int, hits: int, heard_from: str) -> int:
        said = msgspec.structs.replace(
            report("a", os.getpid(), hits=hits), worker_pid=worker_pid, heard_from=heard_from
        )
        mounts.add_report(said)
        return mounts.counters()["hits_memory"]

    mounts = MountRegistry("second")
    assert tell(mounts, 7, 2000, "first") == 0
    assert tell(mounts, 7, 2005, "second") == 5
    assert mounts.views()[0].counters["hits_memory"] == 2005
    assert tell(mounts, 8, 3, "") == 8  # a new worker in its place
    mounts.add_report(msgspec.structs.replace(report("a", os.getpid(), hits=4, closing=True), worker_pid=8))
    assert mounts.counters()["hits_memory"] == 9
    again = MountRegistry("third")
    assert tell(again, 8, 10, "") == 10  # it has reported to nobody before: this daemon is the first


def test_a_mount_of_all_datasets_says_of_which_snapshots_files_were_read() -> None:
    mounts = MountRegistry()
    mounts.add_report(report("m", os.getpid(), "all"))
    assert mounts.read_counts()["m"].snapshots is None  # a mount of an earlier release
    for worker, read in ((0, []), (0, ["a1"]), (1, ["a1", "b1"]), (0, [])):
        before = mounts.read_counts()["m"].snapshots
        said = msgspec.structs.replace(report("m", os.getpid(), "all"), worker=worker, snapshots_read=read)
        mounts.add_report(said)
        assert mounts.read_counts()["m"].snapshots == dict(Counter(before or {}) + Counter(read))
    assert mounts.read_counts()["m"].snapshots == {"a1": 2, "b1": 1}
