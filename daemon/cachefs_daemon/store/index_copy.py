"""A fresh index out of the one the last daemon left, made in a child process.

LMDB trusts its file: a damaged page can crash or hang whoever reads it, or fail every later commit. So no daemon goes
on with an old file. A child process reads it entry by entry and appends what can be an entry to a new one, in which
every page is sound; what is lost on the way is found again in the segments. Measured: 0.9 s for a million entries. The
child is killed with the daemon: it would write on into a file that the next start has given up.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import lmdb

from cachefs.block import KEY_SIZE
from cachefs.errors import CachefsError
from cachefs.index import BLOCKS_DB, MAP_SIZE, MAX_DBS
from cachefs_daemon.store.index_writer import open_environment

_DEADLINE_SECONDS: Final = 120
_PR_SET_PDEATHSIG: Final = 1


def copy_entries(old: Path, new: Path) -> str:
    """What kept the entries of *old* from getting into *new*, in a few words; empty where nothing did."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(os.getpid()), str(old), str(new)],
            capture_output=True, text=True, timeout=_DEADLINE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"reading it took more than {_DEADLINE_SECONDS} s"
    if child.returncode < 0:
        return f"reading it ended with signal {-child.returncode}"
    if child.returncode > 0:
        return (child.stderr.strip().splitlines() or ["unreadable"])[-1]
    return ""


def make_empty(path: Path) -> None:
    """A new index without entries. Raises CachefsError."""
    try:
        environment = open_environment(path)
        environment.open_db(BLOCKS_DB)
        environment.close()
    except (lmdb.Error, OSError) as error:
        raise CachefsError(
            f"the index {path} cannot be made: {error}; free space there or set another state_dir"
        ) from None


def _copy(old: Path, new: Path) -> None:
    """Raises lmdb.Error, or dies. What the records say is checked against the segments later."""
    source = lmdb.open(str(old), subdir=False, readonly=True, lock=False, max_dbs=MAX_DBS, map_size=MAP_SIZE)
    target = open_environment(new)
    last = b""
    with (
        source.begin(db=source.open_db(BLOCKS_DB, create=False)) as reading,
        reading.cursor() as entries,
        target.begin(write=True, db=target.open_db(BLOCKS_DB)) as writing,
    ):
        for key, record in entries:
            if len(key) == KEY_SIZE and record and key > last:
                writing.put(key, record, append=True)
                last = key
    target.close()


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the daemon has ended")


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    try:
        _copy(Path(sys.argv[2]), Path(sys.argv[3]))
    except lmdb.Error as error:
        sys.exit(str(error))
