"""Listing an origin and building its snapshot, in a process of its own.

A million keys take ten seconds of Python and hundreds of megabytes. They must not block the daemon's event loop, nor
stay in its memory. The child (`python -m cachefs_daemon.datasets.listing`) reads one ListingRequest as a line of JSON,
and writes progress as lines of JSON and last the result. It dies with its parent: its standard input ends when the
parent ends.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator
from enum import StrEnum
from pathlib import Path
from typing import Final

import lmdb
import msgspec

from cachefs import errors
from cachefs.errors import CachefsError, NotFound, OriginUnavailable
from cachefs.messages import ListingProgress, Message, OriginOptions
from cachefs.snapshot_builder import SnapshotBuilder
from cachefs_daemon.origin.base import OriginSettings, open_origin

# Seconds after which a silent child is given up. A living one reports twice a second; only a hung disk keeps it silent
# for long, when it syncs the file.
_SILENCE: Final = 120.0
_INTERVAL: Final = 0.5  # seconds between two reports


class ListingPhase(StrEnum):
    """What a listing does now."""

    LISTING = "listing"  # asks the origin what there is
    BUILDING = "building"  # writes the snapshot


class ListingRequest(Message, frozen=True):
    """What the child is to list."""

    url: str
    # Bytes of the snapshot's blocks.
    block_size: int
    # Directory into which the snapshot file is written.
    directory: str
    options: OriginOptions = OriginOptions()
    settings: OriginSettings = OriginSettings()


class _Built(Message, frozen=True, tag=True):
    """The end of a listing."""

    # Path of the snapshot file.
    path: str


class _Failed(Message, frozen=True, tag=True):
    """The end of a listing that found no snapshot."""

    # Name of the class in cachefs.errors.
    error: str
    message: str


class _Progress(Message, frozen=True, tag=True):
    """How far a listing is."""

    phase: ListingPhase
    # Objects so far, and their bytes.
    objects: int
    bytes: int


_LINE: Final = msgspec.json.Decoder(_Built | _Failed | _Progress)


async def build_snapshot(request: ListingRequest) -> AsyncGenerator[ListingProgress | Path, None]:
    """List the origin and build its snapshot. Yields progress, and last the path of the snapshot.

    Closing the iterator ends the child. Raises the CachefsError that the child met, OriginUnavailable where it died or
    hung.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cachefs_daemon.datasets.listing",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(request) + b"\n")
        while line := await asyncio.wait_for(child.stdout.readline(), _SILENCE):
            match _LINE.decode(line):
                case _Progress(phase=phase, objects=objects, bytes=size):
                    yield ListingProgress(phase=phase, objects=objects, bytes=size)
                case _Built(path=path):
                    yield Path(path)
                    return
                case _Failed(error=error, message=message):
                    raise getattr(errors, error)(message)
        status = await child.wait()
        raise OriginUnavailable(f"the listing of {request.url} ended early (status {status}); see the daemon's log")
    except TimeoutError:
        raise OriginUnavailable(f"the listing of {request.url} made no progress for {_SILENCE:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        await child.wait()


def main() -> int:
    """Runs in the child. Returns its exit status: 0 where it built the snapshot, else 1."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=ListingRequest)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        path = _build(request)
    except CachefsError as error:
        _say(_Failed(error=type(error).__name__, message=str(error)))
    else:
        _say(_Built(path=str(path)))
        return 0
    return 1


def _build(request: ListingRequest) -> Path:
    """Raises CachefsError."""
    try:
        builder = asyncio.run(_list(request))
    except OSError as error:
        raise OriginUnavailable(f"the listing of {request.url} failed: {error}") from None
    if not builder.objects:
        raise NotFound(f"there is nothing at {request.url}; check the URL (a prefix is a whole directory name)")
    next_report = 0.0

    def progress(phase: str, objects: int, size: int) -> None:
        nonlocal next_report
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _INTERVAL
            _say(_Progress(phase=ListingPhase(phase), objects=objects, bytes=size))

    try:
        return builder.write(Path(request.directory), progress)
    except (OSError, lmdb.Error) as error:
        raise CachefsError(f"cannot write a snapshot into {request.directory}: {error}") from None


async def _list(request: ListingRequest) -> SnapshotBuilder:
    origin = open_origin(request.url, request.options, request.settings)
    builder = SnapshotBuilder(origin.url, request.block_size, origin.identity)
    reporting = asyncio.create_task(_report_listing(builder))
    try:
        async for batch in origin.list(builder.report):
            builder.add(batch)
    finally:
        reporting.cancel()
        await origin.close()
    return builder


async def _report_listing(builder: SnapshotBuilder) -> None:
    while True:
        _say(_Progress(phase=ListingPhase.LISTING, objects=builder.objects, bytes=builder.bytes))
        await asyncio.sleep(_INTERVAL)


def _say(message: _Progress | _Built | _Failed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _die_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
