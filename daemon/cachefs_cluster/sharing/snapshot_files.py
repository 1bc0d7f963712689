"""Transfers snapshot files between nodes: serves them, and fetches them from any node that has them."""

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import aiohttp
from aiohttp import web

from cachefs.backoff import Backoff
from cachefs.errors import CachefsError, SnapshotDamaged, StoreFull
from cachefs.sizes import format_size
from cachefs.snapshot import FOOTER, MAGIC, SnapshotMeta
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.sharing.peer_http import PeerBusy, PeerFailed, PeerNotFound
from cachefs_cluster.sharing.sections import is_digest
from cachefs_cluster.sharing.snapshot_check import SnapshotChecker
from cachefs_cluster.sharing.state import SharedState
from cachefs_cluster.sharing.wire import SNAPSHOTS
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Files that are sent at the same time, to all nodes: others are told to ask later, or another node. A file thus reaches
# N nodes in about log N rounds, and not one node after the other.
MAX_SERVED: Final = 4
# Files that are fetched at the same time: of current snapshots, and beside them of older ones, which may be many and
# large, and must not delay a dataset that was just added.
MAX_FETCHED: Final = 2
MAX_OLDER_FETCHED: Final = 1
PIECE: Final = 1 << 20
# Timeouts in seconds: until the next bytes; for one file from one node, after which another node continues it; and for
# DEADLINE_BYTES more bytes of a file from all nodes together.
PROGRESS_SECONDS: Final = 20.0
NODE_SECONDS: Final = 1800.0
FILE_SECONDS: Final = 3600.0
DEADLINE_BYTES: Final = 256 << 20
# Pauses in seconds until all nodes are asked again: doubled from the first to the last; and how many rounds in a row
# may fail.
FIRST_PAUSE: Final = 0.5
MAX_PAUSE: Final = 10.0
_SPREAD: Final = (0.75, 1.25)
ROUNDS: Final = 6
# Share of the file system that stays free.
FREE_SHARE: Final = 0.02
# Most bytes of a file: the limit of snapshots that are built.
MAX_FILE: Final = 64 << 30

FindSnapshot = Callable[[str], Path | None]


@dataclass(slots=True)
class _PartialFile:
    """The received part of a file."""

    path: Path
    # Most bytes of the whole file.
    max_size: int
    # Validates the whole file.
    checker: SnapshotChecker
    size: int = 0  # bytes received so far
    # ETag of the file: two nodes that listed the same dataset have different files of one snapshot.
    tag: str = ""
    # The nodes that sent parts, for people.
    names: list[str] = field(default_factory=list)
    # When the transfer is given up; and the size at which the deadline is next extended.
    deadline: asyncio.Timeout | None = None
    next_size: int = DEADLINE_BYTES

    def add_received(self, size: int) -> None:
        """Count *size* more bytes."""
        self.size += size
        if self.size >= self.next_size:
            self.next_size = self.size + DEADLINE_BYTES
            self.extend_deadline()

    def extend_deadline(self) -> None:
        """Restart the deadline."""
        if self.deadline is not None:
            self.deadline.reschedule(asyncio.get_running_loop().time() + FILE_SECONDS)


class _FetchLimit:
    """Limits how many files are fetched and checked at the same time."""

    def __init__(self, count: int) -> None:
        self.semaphore = asyncio.Semaphore(count)
        self.checker = SnapshotChecker()


class SnapshotFiles:
    """Serves and fetches snapshot files. Used on the event loop."""

    def __init__(self, shared: SharedState, find: FindSnapshot, threads: Threads) -> None:
        """find: returns the path of a snapshot's file; None if this node does not have it."""
        self._shared = shared
        self._find = find
        self._threads = threads
        self._served = 0
        self._current = _FetchLimit(MAX_FETCHED)
        self._older = _FetchLimit(MAX_OLDER_FETCHED)
        shared.endpoint.add_route("GET", f"{SNAPSHOTS}/{{snapshot}}", self._serve_file)

    async def close(self) -> None:
        await self._current.checker.close()
        await self._older.checker.close()

    async def fetch_older(
        self, snapshot_id: str, likely: Sequence[str], path: Path, most: Callable[[], int]
    ) -> SnapshotMeta:
        """Fetch as `fetch` does, for a snapshot that is current nowhere, without delaying current ones."""
        return await self._fetch_in_turn(self._older, snapshot_id, likely, path, most)

    async def fetch(self, snapshot_id: str, likely: Sequence[str], path: Path, most: Callable[[], int]) -> SnapshotMeta:
        """Fetch the file of a snapshot to *path*, whole and checked. likely: ids of nodes that should have it, which
        are asked first. most: called when its turn comes; returns the most bytes of the file, or raises CachefsError if
        it is no longer wanted. Raises PeerFailed, StoreFull."""
        return await self._fetch_in_turn(self._current, snapshot_id, likely, path, most)

    async def _fetch_in_turn(
        self, turns: _FetchLimit, snapshot_id: str, likely: Sequence[str], path: Path, most: Callable[[], int]
    ) -> SnapshotMeta:
        async with turns.semaphore:
            partial = _PartialFile(path, min(most(), MAX_FILE), turns.checker)
            try:
                async with asyncio.timeout(FILE_SECONDS) as deadline:
                    partial.deadline = deadline
                    return await self._fetch(snapshot_id, likely, partial)
            except TimeoutError:
                raise PeerFailed(
                    f"received {format_size(partial.size)} of snapshot {snapshot_id}, then less than "
                    f"{format_size(DEADLINE_BYTES)} more within {FILE_SECONDS:.0f} s"
                ) from None

    async def _fetch(self, snapshot_id: str, likely: Sequence[str], partial: _PartialFile) -> SnapshotMeta:
        """Raises PeerFailed, StoreFull."""
        backoff, last = Backoff(FIRST_PAUSE, MAX_PAUSE, _SPREAD), PeerFailed("no other node is reachable")
        tries = 0
        while tries < ROUNDS:
            before = partial.next_size
            for record in self._candidate_nodes(likely):
                try:
                    await self._fetch_from(record, snapshot_id, partial)
                    return await self._verify_file(snapshot_id, partial)
                except (PeerNotFound, PeerBusy) as error:
                    last = PeerFailed(f"node {record.name}: {error}")
                except PeerFailed as error:
                    last = PeerFailed(f"node {record.name}: {error}")
                    log.info("snapshot %s could not be fetched from node %s: %s", snapshot_id, record.name, error)
            tries = tries + 1 if partial.next_size == before else 0
            await asyncio.sleep(backoff.note_failure(time.monotonic()))
        raise PeerFailed(f"no node could send snapshot {snapshot_id}: {last}")

    def _candidate_nodes(self, likely: Iterable[str]) -> list[NodeRecord]:
        """Return the likely nodes, then the others, each group shuffled, so that not all nodes ask one."""
        first = [record for node in dict.fromkeys(likely) if (record := self._shared.node_record(node)) is not None]
        others = [
            record
            for record in self._shared.membership.view.reachable
            if record not in first and self._shared.has_responded(record.id)
        ]
        random.shuffle(first)
        random.shuffle(others)
        silent = self._shared.node_problems()
        return sorted([*first, *others], key=lambda record: record.id in silent)

    async def _fetch_from(self, node: NodeRecord, snapshot_id: str, partial: _PartialFile) -> None:
        """Continue the file from this node. Raises PeerFailed, StoreFull."""
        headers = {"Range": f"bytes={partial.size}-", "If-Range": partial.tag} if partial.size else {}
        path = f"{SNAPSHOTS}/{snapshot_id}"
        async with self._shared.http.request(node, "GET", path, NODE_SECONDS, headers=headers) as response:
            if response.status != 206 or response.headers.get("Content-Range", "").partition("-")[0] != (
                f"bytes {partial.size}"
            ):
                partial.size, partial.tag, partial.names = 0, response.headers.get("ETag", "")[:64], []
            length = response.content_length
            if length is None or not FOOTER.size < partial.size + length <= partial.max_size:
                raise PeerFailed(
                    f"it offers {length} bytes, which is no valid size of a snapshot, or more than this node accepts"
                )
            _check_free_space(partial.path, length)
            partial.names.append(node.name)
            began = time.monotonic()
            with partial.path.open("r+b") as file:
                await self._threads.background(_truncate, file, partial.size)
                async for piece in _pieces(response, length):
                    await self._threads.background(_write, file, piece)
                    partial.add_received(len(piece))
        log.info(
            "snapshot %s: %s from node %s in %.1f s",
            snapshot_id, format_size(length), node.name, time.monotonic() - began,
        )  # fmt: skip

    async def _verify_file(self, snapshot_id: str, partial: _PartialFile) -> SnapshotMeta:
        """Validate the whole file. Raises PeerFailed."""
        partial.extend_deadline()  # all bytes are there; the check of a large file has its own deadline
        try:
            meta = await partial.checker.check(partial.path, partial.size)
            if meta.id != snapshot_id:
                raise SnapshotDamaged(f"it contains snapshot {meta.id}")
        except SnapshotDamaged as error:
            names, partial.size, partial.tag = ", ".join(partial.names), 0, ""
            log.warning("the file of snapshot %s from node %s is invalid: %s", snapshot_id, names, error)
            raise PeerFailed(f"the received file is invalid: {error}") from None
        return meta

    async def _serve_file(self, request: web.Request) -> web.StreamResponse:
        snapshot_id = request.match_info["snapshot"]
        path = self._find(snapshot_id) if is_digest(snapshot_id) else None
        if path is None:
            return web.Response(status=404, text="this node does not have it")
        if self._served >= MAX_SERVED:
            return web.Response(
                status=503, text=f"{self._served} snapshots are being sent; try again", headers={"Retry-After": "1"}
            )
        self._served += 1
        try:
            return await self._send_file(request, path)
        finally:
            self._served -= 1

    async def _send_file(self, request: web.Request, path: Path) -> web.StreamResponse:
        try:
            file, size, tag = await self._threads.background(_open_file, path)
        except (OSError, CachefsError) as error:
            return web.Response(status=404, text=f"it cannot be read: {error}")
        with file:
            start = _first_byte(request, size, tag)
            headers = {"ETag": tag, "Content-Type": "application/octet-stream"}
            if start:
                headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            response = web.StreamResponse(status=206 if start else 200, headers=headers)
            response.content_length = size - start
            await response.prepare(request)
            file.seek(start)
            while piece := await self._threads.background(file.read, PIECE):
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await response.write(piece)
            await response.write_eof()
            return response


def _first_byte(request: web.Request, size: int, tag: str) -> int:
    """Return the first byte to send."""
    byte_range = request.headers.get("Range", "")
    number = byte_range.removeprefix("bytes=").removesuffix("-")
    if request.headers.get("If-Range") != tag or not number.isdecimal() or len(number) > 19:
        return 0
    return int(number) if int(number) < size else 0


def _open_file(path: Path) -> tuple[BinaryIO, int, str]:
    """Open the file, and return it with its size and ETag. Raises OSError, SnapshotDamaged."""
    file = path.open("rb")
    try:
        size = os.fstat(file.fileno()).st_size
        magic, length, digest = FOOTER.unpack(os.pread(file.fileno(), FOOTER.size, max(0, size - FOOTER.size)))
        if magic != MAGIC or length + FOOTER.size != size:
            raise SnapshotDamaged("it is incomplete")
        return file, size, f'"{digest.hex()}"'
    except BaseException:
        file.close()
        raise


async def _pieces(response: aiohttp.ClientResponse, length: int) -> AsyncIterator[bytes]:
    """Yield the body, which has *length* bytes. Raises PeerFailed."""
    left = length
    while left:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(PROGRESS_SECONDS):
                while size < min(PIECE, left):
                    part = await response.content.read(min(PIECE, left) - size)
                    if not part:
                        raise PeerFailed(f"it ends {left - size:,} bytes before its end")
                    parts.append(part)
                    size += len(part)
        except TimeoutError:
            raise PeerFailed(f"no bytes for {PROGRESS_SECONDS:.0f} s") from None
        left -= size
        yield b"".join(parts)


def _truncate(file: BinaryIO, size: int) -> None:
    file.truncate(size)
    file.seek(size)


def _write(file: BinaryIO, piece: bytes) -> None:
    """Write *piece*. Raises StoreFull: a local fault that another peer would not cure."""
    try:
        file.write(piece)
        file.flush()
    except OSError as error:
        raise StoreFull(f"a snapshot cannot be written to {Path(file.name).parent}: {error.strerror}") from None


def _check_free_space(path: Path, size: int) -> None:
    """Raise StoreFull if the file system lacks the space."""
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize - int(FREE_SHARE * room.f_blocks * room.f_frsize)
    if size > free:
        raise StoreFull(
            f"no room in {path.parent} for a snapshot of {format_size(size)}: {format_size(max(0, free))} are free "
            f"besides the {FREE_SHARE:.0%} that stay free"
        )
