"""Copies the index of the last daemon into a new one, in a child process.

LMDB trusts its file: a damaged page can crash or hang a reader, or fail every later commit. So no daemon continues with
an old file. A child process reads the old file entry by entry and appends entries of valid form to a new one, in which
every page is sound; entries that are lost are found again in the segments. Measured: 0.9 s for a million entries on a
quiet machine, 5 s on a busy one. There is no deadline for the whole copy, but one for each part: the child reports
every part that it has copied. The child is killed with the daemon, since it would go on writing into a file that the
next start has given up.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import lmdb

from cachefs.block import KEY_SIZE
from cachefs.errors import CachefsError
from cachefs.index import BLOCKS_DB, MAP_SIZE, MAX_DBS
from cachefs.sizes import format_size
from cachefs_daemon.store.index_writer import open_environment

# Seconds within which the next part must be copied and written, and bytes of a part.
PART_SECONDS: Final = 120.0
_PART_BYTES: Final = 8 << 20
_PR_SET_PDEATHSIG: Final = 1


def copy_entries(old: Path, new: Path) -> str:
    """Copy the entries of *old* to *new*. Return the reason for a failure, or ""."""
    from cachefs.systemd import StartupTimer  # imports asyncio, which would be a third of the child's time

    start = StartupTimer()
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(old), str(new)]
    with tempfile.TemporaryFile() as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as child:
        assert child.stdout is not None
        copied = 0
        while parts := _next_parts(child.stdout.fileno(), PART_SECONDS):
            copied += len(parts) * _PART_BYTES
            start.extend_timeout()
        if parts is None:
            child.kill()
            return f"nothing of it was copied for {PART_SECONDS:g} s, after {format_size(copied)}"
        status = child.wait()
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    if status < 0:
        return f"reading it ended with signal {-status}"
    return "" if status == 0 else (lines or ["unreadable"])[-1]


def _next_parts(pipe: int, seconds: float) -> bytes | None:
    """Return a byte for each part that was copied; b"" at the end. None where none arrives within *seconds*."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    return os.read(pipe, 4096) if readable else None


def make_empty(path: Path) -> None:
    """Create an index without entries. Raises CachefsError."""
    try:
        environment = open_environment(path)
        environment.open_db(BLOCKS_DB)
        environment.close()
    except (lmdb.Error, OSError) as error:
        raise CachefsError(
            f"the index {path} cannot be made: {error}; free space there or set another state_dir"
        ) from None


def _copy(old: Path, new: Path) -> None:
    """Copy the entries. Raises lmdb.Error, or dies. The records are checked against the segments later."""
    source = lmdb.open(str(old), subdir=False, readonly=True, lock=False, max_dbs=MAX_DBS, map_size=MAP_SIZE)
    target = open_environment(new)
    blocks, last, size = target.open_db(BLOCKS_DB), b"", 0
    with source.begin(db=source.open_db(BLOCKS_DB, create=False)) as reading, reading.cursor() as entries:
        writing = target.begin(write=True, db=blocks)
        try:
            for key, record in entries:
                if len(key) == KEY_SIZE and record and key > last:
                    writing.put(key, record, append=True)
                    last, size = key, size + len(key) + len(record)
                if size >= _PART_BYTES:
                    writing.commit()
                    os.write(1, b".")
                    writing, size = target.begin(write=True, db=blocks), 0
            writing.commit()
        except BaseException:
            writing.abort()
            raise
    target.close()


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the daemon has ended")


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[1]))
    try:
        _copy(Path(sys.argv[2]), Path(sys.argv[3]))
    except lmdb.Error as error:
        sys.exit(str(error))
