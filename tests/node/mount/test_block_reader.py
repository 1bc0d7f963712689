"""Reads of a worker on a real node: where the disk of the SSD tier hangs, and where too many reads wait."""

import contextlib
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from cachefs.block import MAX_READ, SSD, block_key
from cachefs.errors import CachefsError
from cachefs.messages import REPORT_SHARE, Empty
from cachefs.mount.reads import block_reader, read_records
from cachefs.mount.reads.block_reader import BlockReader, Counters
from cachefs.mount.reads.fetch_channel import FetchChannelClient
from cachefs.mount.reads.read_records import ReadMarks
from cachefs.rpc import NODE
from cachefs.segment import SegmentReader
from cachefs.snapshot import Entry, Snapshot
from tests.daemon import Daemon, block_ref
from tests.waiting import until_async

SIZE = 3 << 20
FILES = 12


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose memory tier has room for half of the dataset."""
    top = tmp_path / "origin"
    top.mkdir()
    for number in range(FILES):
        (top / f"{number}").write_bytes(random.Random(number).randbytes(SIZE))
    with Daemon(tmp_path / "node", {"memory": {"budget": "20MiB", "segment_size": "8MiB"}}) as running:
        yield running


class HangingDisk(SegmentReader):
    """What reads the SSD tier cannot do so without waiting, and then hangs."""

    goes_on = threading.Event()

    def read(self, key, location, start, size, buffer, *, wait=True):  # type: ignore[no-untyped-def]
        if location.tier == SSD:
            if not wait:
                raise BlockingIOError
            self.goes_on.wait(60)
        return super().read(key, location, start, size, buffer, wait=wait)


@contextlib.asynccontextmanager
async def reading(daemon: Daemon) -> AsyncIterator[BlockReader]:
    marks, failures = (ReadMarks(read_records.create_read_marks()) for _ in range(2))
    channel = FetchChannelClient(daemon.socket)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.run)
        yield BlockReader(channel, daemon.client.call(NODE, Empty()), Counters(), marks, failures)
        nursery.cancel_scope.cancel()


def test_a_disk_that_hangs_is_not_waited_for(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    view = daemon.add_dataset("tree", f"file://{tmp_path}/origin")
    daemon.fetch(*(block_ref(view, f"{number}") for number in range(FILES)))
    monkeypatch.setattr(block_reader, "SegmentReader", HangingDisk)
    monkeypatch.setattr(block_reader, "SegmentReader", HangingDisk)
    monkeypatch.setattr(block_reader, "MAX_WAIT_SECONDS", 0.1)
    snapshot = Snapshot(Path(view.path))
    entries = [snapshot.find_path(b"%d" % number) for number in range(FILES)]

    async def run() -> int:
        async with reading(daemon) as ours:
            on_disk = [(number, entry) for number, entry in enumerate(entries) if entry and tier_of(ours, entry) == SSD]
            for number, entry in on_disk:
                expected = random.Random(number).randbytes(SIZE)
                assert await ours.read(snapshot, entry.number, 0, 4096) == expected[:4096]
        return len(on_disk)

    def tier_of(ours: BlockReader, entry: Entry) -> int | None:
        location = ours._tiers.index.get(block_key(entry.content, 0))
        return location.tier if location else None

    try:
        assert trio.run(run) > 1
    finally:
        HangingDisk.goes_on.set()
        snapshot.close()
    assert [record.message for record in caplog.records if "has not answered" in record.message] != []
    # It takes blocks again as soon as the daemon finds out that its own view of the disk works.
    assert "ssd tier takes no new blocks: " in (said := daemon.log.read_text())
    assert "a reader waited for a block" in said


def test_where_too_many_reads_wait_one_more_fails_at_once(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = daemon.add_dataset("tree", f"file://{tmp_path}/origin")
    monkeypatch.setattr(block_reader, "MAX_WAITING", 1)
    daemon.fetch(block_ref(view, "0"))
    snapshot = Snapshot(Path(view.path))
    first, second, third = (entry.number for name in (b"0", b"1", b"2") if (entry := snapshot.find_path(name)))

    async def run() -> None:
        assert daemon.process is not None
        async with reading(daemon) as ours, trio.open_nursery() as nursery:
            key = block_key(snapshot.entry(first).content, 0)
            # The daemon answers before others see the block in the index.
            await until_async(lambda: ours._tiers.index.get(key))
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                nursery.start_soon(ours.read, snapshot, second, 0, 10)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(CachefsError, match="wait already"):
                    await ours.read(snapshot, third, 0, 10)
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            assert await ours.read(snapshot, first, 0, 10) == random.Random(0).randbytes(SIZE)[:10]

    trio.run(run)
    snapshot.close()


def test_a_report_is_due_once_a_part_of_the_tiers_was_read(daemon: Daemon, tmp_path: Path) -> None:
    view = daemon.add_dataset("tree", f"file://{tmp_path}/origin")
    daemon.fetch(*(block_ref(view, f"{number}") for number in range(FILES)))
    snapshot = Snapshot(Path(view.path))
    entries = [entry.number for number in range(FILES) if (entry := snapshot.find_path(b"%d" % number))]

    async def run() -> None:
        async with reading(daemon) as ours:
            node = daemon.client.call(NODE, Empty())
            ours.adopt_view(msgspec.structs.replace(node, capacity=int(2.5 * MAX_READ / REPORT_SHARE)))
            for number, is_due in ((entries[0], False), (entries[1], False), (entries[2], True)):
                await ours.read(snapshot, number, 0, MAX_READ)
                assert ours.report_due.is_set() == is_due
            assert len(ours.take_accessed()) == 3
            assert not ours.report_due.is_set()

    trio.run(run)
    snapshot.close()
