"""Snapshot files from node to node: resumed, checked, and had from another node where one fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest
from aiohttp import web

from cachefs.errors import SnapshotDamaged, StoreFull
from cachefs.snapshot import FOOTER, MAGIC, SnapshotMeta
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_cluster.sharing import snapshot_files
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.snapshot_check import verify_snapshot
from cachefs_cluster.sharing.snapshot_files import SnapshotFiles
from cachefs_daemon.runtime.threads import Threads
from tests.sharing import SharingNode, introduce, node_record
from tests.waiting import until_async


def most() -> int:
    """Return the bytes that a file may have."""
    return snapshot_files.MAX_FILE


def snapshot(directory: Path, count: int = 3000) -> Path:
    objects = [ListedObject(b"d%d/%d" % (number % 7, number), number, number, b"v") for number in range(count)]
    return build_snapshot_file(objects, "s3://bucket/data", 4 << 20, lambda key: b"s3:" + key, directory)


@contextlib.asynccontextmanager
async def nodes(*files: Path | None) -> AsyncIterator[list[tuple[SharingNode, SnapshotFiles]]]:
    """A node for each of these files, which it serves whatever is asked for; one without a file has none."""
    threads = Threads()
    made = []
    for number, path in enumerate(files, 1):
        node = SharingNode(node_record(number), threads)
        made.append((node, SnapshotFiles(node.shared, lambda _, path=path: path, threads)))
    try:
        for node, _ in made:
            await node.start()
        introduce([node for node, _ in made])
        yield made
    finally:
        for node, served in made:
            await served.close()
            await node.shared.stop()
        threads.close()


def test_a_disk_that_is_full_here_is_not_the_fault_of_who_sends(tmp_path: Path) -> None:
    path = snapshot(tmp_path)

    async def scenario() -> None:
        async with nodes(None, path, path) as found:
            (_, files), *_ = found
            with (
                patch.object(snapshot_files, "_truncate", lambda file, size: None),
                patch.object(snapshot_files, "_check_free_space", lambda path, size: None),
                pytest.raises(StoreFull, match="a snapshot cannot be written to /dev: No space left"),
            ):
                await files.fetch("0" * 32, [f"{number:016x}" for number in (2, 3)], Path("/dev/full"), most)

    asyncio.run(scenario())


def test_a_file_comes_whole_and_only_from_a_node_that_has_the_right_one(tmp_path: Path) -> None:
    path = snapshot(tmp_path)
    (wrong := tmp_path / "wrong").mkdir()
    other = snapshot(wrong, 10)
    damaged = tmp_path / "damaged"
    content = bytearray(path.read_bytes())
    content[20_000] ^= 1
    damaged.write_bytes(content)

    async def scenario() -> None:
        async with nodes(None, other, damaged, None, path) as found:
            (received := tmp_path / "received").touch()
            asked = [f"{number:016x}" for number in (2, 3, 4, 5)]
            with patch("random.shuffle"):
                meta = await found[0][1].fetch(path.stem, asked, received, most)
            assert (meta.id, meta.files, meta.block_size) == (path.stem, 3000, 4 << 20)
            assert received.read_bytes() == path.read_bytes()

    asyncio.run(scenario())


def test_a_file_goes_on_where_it_stopped_if_it_is_the_same(tmp_path: Path) -> None:
    path = snapshot(tmp_path)
    (twin := tmp_path / "twin").mkdir()
    same = snapshot(twin)  # the same snapshot, made at another time
    assert (same.name, same.read_bytes() == path.read_bytes()) == (path.name, False)
    contents = {one: one.read_bytes() for one in (path, same)}
    ranges: list[str] = []
    real, grow = SnapshotFiles._send_file, snapshot_files._PartialFile.add_received
    grown = asyncio.Event()

    def grow_and_tell(self: snapshot_files._PartialFile, size: int) -> None:
        grow(self, size)
        grown.set()

    async def cut_short(self: SnapshotFiles, request: web.Request, source: Path) -> web.StreamResponse:
        ranges.append(request.headers.get("Range", ""))
        if len(ranges) <= 2:
            content = contents[source]
            response = web.StreamResponse(headers={"ETag": f'"{content[-16:].hex()}"'})
            response.content_length = len(content)
            await response.prepare(request)
            grown.clear()
            await response.write(content[:70_000])
            await grown.wait()
            assert request.transport is not None
            request.transport.close()
            return response
        return await real(self, request, source)

    async def scenario() -> None:
        async with nodes(None, path, same) as found:
            (received := tmp_path / "received").touch()
            with (
                patch.object(SnapshotFiles, "_send_file", cut_short),
                patch.object(snapshot_files._PartialFile, "add_received", grow_and_tell),
                patch.object(snapshot_files, "PIECE", 1 << 16),
                patch("random.shuffle"),
            ):
                meta = await found[0][1].fetch(path.stem, [f"{2:016x}"], received, most)
            assert meta.id == path.stem
            assert received.read_bytes() in (path.read_bytes(), same.read_bytes())
            # Each begins anew at another node, which has another file; and goes on at one that has the same.
            assert ranges[0] == ""
            assert ranges[1] == f"bytes={1 << 16}-"
            assert ranges[2] == f"bytes={1 << 16}-"

    asyncio.run(scenario())


def test_what_cannot_be_had_is_an_error_with_a_reason(tmp_path: Path) -> None:
    path = snapshot(tmp_path)

    async def scenario() -> None:
        async with nodes(None, None, path) as found:
            (received := tmp_path / "received").touch()
            others = [f"{2:016x}", f"{3:016x}"]
            await until_async(lambda: all(map(found[0][0].shared.has_responded, others)))
            with patch.object(snapshot_files, "ROUNDS", 1), patch.object(snapshot_files, "FIRST_PAUSE", 0.0):
                with pytest.raises(PeerFailed, match=r"no node could send snapshot 0{32}: node node-"):
                    await found[0][1].fetch("0" * 32, [], received, most)
                with (
                    patch.object(snapshot_files, "MAX_SERVED", 0),
                    pytest.raises(PeerFailed, match="no node could send"),
                ):
                    await found[0][1].fetch(path.stem, [], received, most)
                with (
                    patch.object(snapshot_files, "MAX_FILE", 1000),
                    pytest.raises(PeerFailed, match="no node could send"),
                ):
                    await found[0][1].fetch(path.stem, [], received, most)
                with patch.object(snapshot_files, "FREE_SHARE", 1.0), pytest.raises(StoreFull, match="no room in"):
                    await found[0][1].fetch(path.stem, [], received, most)

    asyncio.run(scenario())


def test_a_file_that_only_looks_like_a_snapshot_is_refused(tmp_path: Path) -> None:
    from xxhash import xxh3_128_digest

    path = snapshot(tmp_path)
    verify_snapshot(path)
    content = bytearray(path.read_bytes()[: -FOOTER.size])

    def sealed(changed: bytes) -> Path:
        fake = tmp_path / "fake"
        fake.write_bytes(changed + FOOTER.pack(MAGIC, len(changed), xxh3_128_digest(changed)))
        return fake

    for changed in (bytes(8192), bytes(content).replace(b"v", b"w", 1), bytes(content).replace(b"/data", b"/date")):
        with pytest.raises(SnapshotDamaged):
            verify_snapshot(sealed(changed))


@pytest.mark.parametrize(
    ("objects", "counts"),
    [
        ([ListedObject(b"a", 1, 1, b"v")], (1, 0, 0)),
        ([ListedObject(b"a", 1, 1, b"v"), ListedObject(b"b", 1, 1, b"v", is_archived=True)], (2, 0, 1)),
        ([ListedObject(b"a", 1, 1, b"v"), ListedObject(b"b//c", 1, 1, b"v")], (1, 1, 0)),
        ([ListedObject(b"a", 1, 1, b"v"), ListedObject(b"a/b", 1, 1, b"v"), ListedObject(b"c/", 0, 1, b"")], (1, 1, 0)),
        ([ListedObject(b"/", 0, 1, b""), ListedObject(b"\xff", 1, 1, b"v\0w", is_archived=True)], (1, 1, 1)),
        ([], (0, 0, 0)),
    ],
)
def test_a_node_takes_each_snapshot_that_a_listing_makes(
    tmp_path: Path, objects: list[ListedObject], counts: tuple[int, int, int]
) -> None:
    path = build_snapshot_file(objects, "s3://bucket/data", 4 << 20, lambda key: b"s3:" + key, tmp_path)
    meta = verify_snapshot(path)
    assert (meta.id, meta.files, meta.problem_count, meta.archived) == (path.stem, *counts)


def test_who_reads_it_may_die_of_it(tmp_path: Path) -> None:
    """The child is another process: what kills it costs the daemon nothing."""
    path = snapshot(tmp_path, 10)

    async def scenario() -> None:
        checker = snapshot_files.SnapshotChecker()
        try:
            await checker.check(path, path.stat().st_size)
            child = checker._child
            assert child is not None
            child.kill()
            await child.wait()
            assert (await checker.check(path, path.stat().st_size)).id == path.stem, "another child takes its place"
            with (
                patch.object(checker, "_query_child", side_effect=ValueError("the process that checks it has ended")),
                pytest.raises(SnapshotDamaged, match="has ended"),
            ):
                await checker.check(path, path.stat().st_size)
        finally:
            await checker.close()

    asyncio.run(scenario())


def test_the_check_of_a_file_takes_no_time_from_its_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = snapshot(tmp_path)
    left: list[float] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def check(received: Path, size: int) -> SnapshotMeta:
            partial = partials[0]
            assert partial.deadline is not None
            left.append((partial.deadline.when() or 0.0) - loop.time())
            return verify_snapshot(received)

        async with nodes(None, path) as found:
            files = found[0][1]
            partials: list[snapshot_files._PartialFile] = []
            real = snapshot_files._PartialFile.add_received

            def grow(self: snapshot_files._PartialFile, size: int) -> None:
                real(self, size)
                partials.append(self)
                assert self.deadline is not None
                self.deadline.reschedule(loop.time() + 60)  # the transfer has taken nearly all of the time

            monkeypatch.setattr(snapshot_files._PartialFile, "add_received", grow)
            monkeypatch.setattr(files._current.checker, "check", check)
            (received := tmp_path / "received").touch()
            await files.fetch(path.stem, [f"{2:016x}"], received, most)

    asyncio.run(scenario())
    assert left[0] > snapshot_files.FILE_SECONDS / 2
