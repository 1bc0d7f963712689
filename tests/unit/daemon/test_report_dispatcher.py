"""For whom pages are pushed into a mount, as mounts and jobs together tell; and what is done about reports."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from cachefs.messages import MountReport, OriginOptions, Stall
from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.report_dispatcher import JobConsumersByMount, ReportDispatcher, ReportHandlers
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time


class Jobs:
    """Consumers `a` of snapshot `one`, and `b` of snapshot `two`."""

    def __init__(self) -> None:
        self.consumer_keys: Collection[str] = ("a", "b")
        self.latency = -1.0

    def push_readers(self, latency: float) -> list[PushReader]:
        self.latency = latency
        return [PushReader(key, snapshot, 0, 0, 0) for key, snapshot in (("a", "one"), ("b", "two"))]


class Mounts:
    """`m1` and `m2` show snapshot `one`, `all` shows everything."""

    def shows(self, mount: str, snapshot: str, datasets: Iterable[Any]) -> bool:
        assert list(datasets) == ["a record"]
        return mount == "all" or snapshot == "one"


def test_only_who_reads_through_a_mount_what_it_shows_is_its_audience() -> None:
    jobs = Jobs()
    audiences = JobConsumersByMount(Mounts(), jobs, [SimpleNamespace(record="a record")])  # type: ignore[arg-type]
    assert [reader.key for reader in audiences.readers()] == ["a", "b"]

    def of(mount: str) -> tuple[list[str], frozenset[str]]:
        audience = audiences.consumers_of(mount, 0.25)
        assert jobs.latency == 0.25
        return [reader.key for reader in audience.readers], audience.read_elsewhere

    assert (of("m1"), of("all")) == ((["a"], frozenset()), (["a", "b"], frozenset()))
    audiences.note_reads("m1", {"a": 100})
    audiences.forget_ended()
    assert (of("m1"), of("m2")) == ((["a"], frozenset()), ([], {"one"}))
    assert of("all") == (["b"], {"one"})
    jobs.consumer_keys = ("b",)
    audiences.forget_ended()
    assert of("m2") == (["a"], frozenset())


def test_mounts_are_looked_at_once_for_all_consumers_of_a_snapshot() -> None:
    looks: list[tuple[str, int]] = []

    class CountedMounts(MountRegistry):
        def shows(self, mount: str, snapshot: str, datasets: Iterable[DatasetRecord]) -> bool:
            looks.append((mount, len(list(datasets))))
            return super().shows(mount, snapshot, datasets)

    mounts, jobs = CountedMounts(), SimpleNamespace(consumer_keys={f"c{number}" for number in range(64)})
    datasets = [
        SimpleNamespace(record=DatasetRecord(f"d{number}", "s3://b/p", OriginOptions(), [SnapshotRecord(f"s{number}")]))
        for number in range(100)
    ]
    audiences = JobConsumersByMount(mounts, jobs, datasets)  # type: ignore[arg-type]

    def report(mount: str, spec: str) -> None:
        mounts.add_report(MountReport(id=mount, mountpoint=f"/nowhere/{mount}", spec=spec, pid=os.getpid()))
        audiences.forget_mounts()

    report("one", "d1")
    report("other", "d2")
    assert [audiences.mounts_of(f"c{number}", "s1") for number in range(64)] == [["one"]] * 64
    assert looks == [("one", 1), ("other", 1)]
    assert audiences.mounts_of("of another node", "s1") == ()
    report("all", "all")
    assert audiences.mounts_of("c0", "s1") == ["one", "all"]
    datasets[1].record = DatasetRecord("d1", "s3://b/p", OriginOptions(), [SnapshotRecord("new"), SnapshotRecord("s1")])
    audiences.forget_ended()
    assert audiences.mounts_of("c0", "s1") == ["one"]


class Everybody:
    """All who listen to reports, and remember what they heard."""

    def __init__(self) -> None:
        self.reports: list[MountReport] = []
        self.reads: list[tuple[Sequence[bytes], int]] = []  # keys, and how many stalls
        self.used: list[Sequence[bytes]] = []
        self.guessed: list[tuple[str, Sequence[bytes]]] = []
        self.mounted: list[Callable[[str], bool]] = []
        self.woken = 0

    def listeners(self) -> ReportHandlers:
        pushers = SimpleNamespace(pages_of=lambda mount: {}, on_reads=lambda mount, keys, tripped: None)
        return ReportHandlers(
            jobs=SimpleNamespace(),  # type: ignore[arg-type]
            attribution=SimpleNamespace(note_reads=self._on_reads),  # type: ignore[arg-type]
            consumers_by_mount=SimpleNamespace(  # type: ignore[arg-type]
                note_reads=lambda mount, own: None, forget_mounts=lambda: None
            ),
            pushers=pushers,  # type: ignore[arg-type]
            pace=SimpleNamespace(wake=self._wake),  # type: ignore[arg-type]
            on_late_reads=lambda seconds, reads, now: None,
            on_readahead_reads=lambda mount, keys: self.guessed.append((mount, list(keys))),
            on_new_mount=self.mounted.append,
        )

    def _on_reads(self, keys: Sequence[bytes], stalls: Sequence[Stall], now: float, pages: Any) -> Any:
        self.reads.append((list(keys), len(stalls)))
        return SimpleNamespace(late_seconds=[], own_reads={}, tripwires_read={})

    def _wake(self) -> None:
        self.woken += 1

    def note_accessed(self, keys: Sequence[bytes], now: float) -> None:
        self.used.append(list(keys))


def test_reports_of_several_workers_are_followed_at_once_before_they_are_answered() -> None:
    def report(worker: int, *keys: bytes) -> MountReport:
        stalls = [Stall(key=keys[0], source="origin", seconds=1.0)] if keys else []
        return MountReport(
            id="m", mountpoint="/m", spec="all", pid=1, worker=worker, worker_pid=2, counters={},
            accessed=list(keys), stalls=stalls,
        )  # fmt: skip

    async def play() -> None:
        heard, threads = Everybody(), Threads()
        mounts = SimpleNamespace(add_report=heard.reports.append)
        exchange = ReportDispatcher(mounts, heard.listeners(), Locked(heard), threads)  # type: ignore[arg-type]
        both = report(0, b"a", b"b"), report(1, b"c")
        await asyncio.gather(*(exchange.on_mount_report(one) for one in both))
        [keys] = heard.used
        assert keys in ([b"a", b"b", b"c"], [b"c", b"a", b"b"])
        assert (heard.reads, heard.woken) == ([(keys, 2)], 1)
        await exchange.on_mount_report(report(2))
        await exchange.on_mount_report(report(1, b"d"))
        assert (heard.reads[1:], len(heard.reports)) == ([([b"d"], 1)], 4)
        assert heard.guessed == [("m", keys), ("m", [b"d"])]
        threads.close()

    virtual_time.run(play())


def test_what_is_mounted_is_told_once() -> None:
    def report(mount: str, spec: str, worker: int = 0) -> MountReport:
        return MountReport(id=mount, mountpoint=f"/{mount}", spec=spec, pid=os.getpid(), worker=worker)

    async def play() -> None:
        heard, threads, mounts = Everybody(), Threads(), MountRegistry()
        exchange = ReportDispatcher(mounts, heard.listeners(), Locked(heard), threads)  # type: ignore[arg-type]
        for one in (report("m", "one@12,two"), report("m", "one@12,two", 1), report("n", "all")):
            await exchange.on_mount_report(one)
        assert [[name for name in ("one", "two", "three") if shows(name)] for shows in heard.mounted] == [
            ["one", "two"], ["one", "two", "three"],
        ]  # fmt: skip
        again = MountRegistry()  # of the next daemon
        again.restore(mounts.records())
        exchange = ReportDispatcher(again, heard.listeners(), Locked(heard), threads)  # type: ignore[arg-type]
        await exchange.on_mount_report(report("m", "one@12,two", 1))
        assert len(heard.mounted) == 3
        threads.close()

    virtual_time.run(play())


def test_what_one_mount_reports_does_not_hold_up_others() -> None:
    def report(mount: str) -> MountReport:
        return MountReport(
            id=mount, mountpoint="/m", spec="all", pid=1, worker=0, worker_pid=2, counters={},
            accessed=[mount.encode()], stalls=[],
        )  # fmt: skip

    async def play() -> None:
        heard, threads = Everybody(), Threads()
        listeners = heard.listeners()
        noted = listeners.pushers.on_reads

        def failing(mount: str, keys: Sequence[bytes], tripped: Any) -> None:
            noted(mount, keys, tripped)
            if mount == "b":
                raise KeyError("a bug")

        listeners.pushers.on_reads = failing  # type: ignore[method-assign]
        mounts = SimpleNamespace(add_report=heard.reports.append)
        exchange = ReportDispatcher(mounts, listeners, Locked(heard), threads)  # type: ignore[arg-type]
        await asyncio.gather(*(exchange.on_mount_report(report(one)) for one in "abc"))
        assert sorted(heard.guessed) == [("a", [b"a"]), ("c", [b"c"])]
        threads.close()

    virtual_time.run(play())
