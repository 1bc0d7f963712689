"""Lists an origin and builds its snapshot, in a child process.

A million keys take twenty seconds of Python. They must not block the daemon's event loop, nor stay in its memory. The
child (`python -m cachefs_daemon.datasets.listing`) reads one ListingRequest as a line of JSON, and writes progress as
lines of JSON and last the result. It dies with its parent: its standard input ends when the parent ends.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import lmdb
import msgspec

from cachefs import errors
from cachefs.errors import CachefsError, NotFound, OriginUnavailable
from cachefs.messages import ListingPhase, ListingProgress, Message, OriginOptions
from cachefs.snapshot_builder import SnapshotBuilder
from cachefs.spill_file import SpillFile
from cachefs_daemon.datasets.listing_journal import ListingJournal
from cachefs_daemon.origin.base import Origin, OriginSettings, ResumableOrigin
from cachefs_daemon.origin.key_ranges import ListingCheckpoint
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.request_counters import OWN_COUNTERS, ChildCounterSet

# Seconds after which a silent child is given up. A working child reports twice a second; only a hung disk keeps it
# silent for long, when it syncs the file.
_MAX_SILENCE_SECONDS: Final = 120.0
_REPORT_SECONDS: Final = 0.5  # seconds between two reports


class ListingRequest(Message, frozen=True):
    """The input of the child."""

    url: str
    # Bytes of the snapshot's blocks.
    block_size: int
    # Directory into which the snapshot file is written.
    directory: str
    options: OriginOptions = OriginOptions()
    settings: OriginSettings = OriginSettings()
    # The prefix of object names; empty: the origin's own.
    named: bytes = b""
    # Directory in which the progress of the listing is kept; empty: it cannot be resumed.
    journal: str = ""
    # Seconds between two saves of that progress. One takes a few milliseconds, and keys listed since the last one may
    # have to be listed twice.
    save_seconds: float = 2.0


class _Built(Message, frozen=True, tag=True):
    # Path of the snapshot file.
    path: str


class _Failed(Message, frozen=True, tag=True):
    # Name of the class in cachefs.errors.
    error: str
    message: str


class _Progress(Message, frozen=True, tag=True):
    phase: ListingPhase
    # Objects so far, and their bytes.
    objects: int
    bytes: int
    # Of these objects, those found by an earlier listing that this one resumes.
    resumed: int = 0


_LINE_DECODER: Final = msgspec.json.Decoder(_Built | _Failed | _Progress)


async def build_snapshot(request: ListingRequest) -> AsyncGenerator[ListingProgress | Path, None]:
    """List the origin and build its snapshot. Yields progress, and last the path of the snapshot.

    Closing the iterator ends the child. Raises the child's CachefsError, OriginUnavailable where it died or hung.
    """
    book = ChildCounterSet()
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cachefs_daemon.datasets.listing",
            str(book.descriptor),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(book.descriptor,),
        )
    except BaseException:
        book.close()
        raise
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(request) + b"\n")
        while line := await asyncio.wait_for(child.stdout.readline(), _MAX_SILENCE_SECONDS):
            match _LINE_DECODER.decode(line):
                case _Progress(phase=phase, objects=objects, bytes=size, resumed=resumed):
                    yield ListingProgress(phase=phase, objects=objects, bytes=size, resumed=resumed)
                case _Built(path=path):
                    yield Path(path)
                    return
                case _Failed(error=error, message=message):
                    raise getattr(errors, error)(message)
        status = await child.wait()
        raise OriginUnavailable(f"the listing of {request.url} ended early (status {status}); see the daemon's log")
    except TimeoutError:
        raise OriginUnavailable(
            f"the listing of {request.url} made no progress for {_MAX_SILENCE_SECONDS:.0f} s"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        try:
            await child.wait()
        finally:
            book.close()


def main() -> int:
    """Run in the child. Return its exit status: 0 where it built the snapshot, else 1."""
    OWN_COUNTERS.use_shared_memory(int(sys.argv[1]))
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=ListingRequest)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        path = _build(request)
    except CachefsError as error:
        _write_message(_Failed(error=type(error).__name__, message=str(error)))
    else:
        _write_message(_Built(path=str(path)))
        return 0
    return 1


def _build(request: ListingRequest) -> Path:
    origin = open_origin(request.url, request.options, request.settings)
    with contextlib.ExitStack() as stack:
        try:
            journal = _open_journal(request.journal) if isinstance(origin, ResumableOrigin) else None
            if journal is not None:
                stack.callback(journal.close)
            spill = journal.rows if journal is not None else SpillFile(Path(request.directory))
        except OSError as error:
            raise CachefsError(f"cannot write a snapshot into {request.directory}: {error}") from None
        listing = _Listing(request, origin, spill, journal)
        if journal is None:
            stack.callback(spill.close)
        try:
            asyncio.run(listing.run())
        except OSError as error:
            raise OriginUnavailable(f"the listing of {request.url} failed: {error}") from None
        left_out = listing.builder.exclusion_reason()
        if left_out or not listing.builder.objects:
            if journal is not None:
                journal.remove()
            if left_out:
                raise NotFound(f"nothing at {request.url} can be a file of a dataset: {left_out}")
            raise NotFound(f"there is nothing at {request.url}; check the URL (a prefix is a whole directory name)")
        try:
            path = listing.builder.write_snapshot(Path(request.directory), listing.report_building)
        except (OSError, lmdb.Error) as error:
            raise CachefsError(f"cannot write a snapshot into {request.directory}: {error}") from None
        if journal is not None:
            journal.remove()
        return path


def _open_journal(directory: str) -> ListingJournal | None:
    """Return None without a directory, or where another listing of the same uses it."""
    try:
        return ListingJournal(Path(directory)) if directory else None
    except BlockingIOError:
        return None


class _Listing:
    def __init__(
        self, request: ListingRequest, origin: Origin, spill: SpillFile, journal: ListingJournal | None
    ) -> None:
        self._origin = origin
        self._save_seconds = request.save_seconds
        named = request.named
        identity = (lambda key: named + key) if named else origin.identity
        self.builder = SnapshotBuilder(origin.url, request.block_size, identity, spill)
        self._journal = journal
        self._resumed = 0
        self._next_report = 0.0
        self._next_save = 0.0

    async def run(self) -> None:
        reporting = asyncio.create_task(self._report_listing())
        try:
            if self._journal is not None and isinstance(self._origin, ResumableOrigin):
                await self._run_with(self._origin, self._journal)
            else:
                async for batch in self._origin.list(self.builder.report_problem):
                    self.builder.add_objects(batch)
        finally:
            reporting.cancel()
            await self._origin.close()

    async def _run_with(self, origin: ResumableOrigin, journal: ListingJournal) -> None:
        """Resume an earlier listing, and save progress for the next one."""
        checkpoint = journal.restore(self.builder) or ListingCheckpoint()
        self._resumed = self.builder.objects
        self._next_save = time.monotonic() + self._save_seconds
        try:
            async for batch in origin.list_from(self.builder.report_problem, checkpoint):
                if checkpoint.remaining_ranges is None:
                    journal.make_unresumable()
                self.builder.add_objects(batch)
                if time.monotonic() >= self._next_save:
                    self._save(journal, checkpoint)
        except CachefsError:
            if checkpoint.remaining_ranges is None:
                journal.make_unresumable()
            self._save(journal, checkpoint)
            raise
        self._save(journal, checkpoint)

    def _save(self, journal: ListingJournal, checkpoint: ListingCheckpoint) -> None:
        if checkpoint.remaining_ranges is not None and self.builder.objects:
            journal.save(self.builder, checkpoint.remaining_ranges, checkpoint.unverified_cuts)
        self._next_save = time.monotonic() + self._save_seconds

    def report_building(self, phase: str, objects: int, size: int) -> None:
        """Report progress, as cachefs.snapshot_builder.BuildProgress."""
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_SECONDS
            _write_message(_Progress(phase=ListingPhase(phase), objects=objects, bytes=size, resumed=self._resumed))

    async def _report_listing(self) -> None:
        while True:
            objects, size = self.builder.objects, self.builder.bytes
            _write_message(_Progress(phase=ListingPhase.LISTING, objects=objects, bytes=size, resumed=self._resumed))
            await asyncio.sleep(_REPORT_SECONDS)


def _write_message(message: _Progress | _Built | _Failed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _die_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
