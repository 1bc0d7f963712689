"""Is an index file sound? Asked in a child process, since reading or writing a damaged LMDB file may crash or hang."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import lmdb

from cachefs.block import KEY_SIZE
from cachefs.index import BLOCKS_DB
from cachefs_daemon.index import open_environment

_DEADLINE_SECONDS: Final = 120
_SCRATCH_KEY: Final = b"index-check"


def damage(path: Path) -> str:
    """What is wrong with the index at *path*, in a few words; empty where it is sound."""
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(path)], capture_output=True, text=True, timeout=_DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"reading it took more than {_DEADLINE_SECONDS} s"
    if child.returncode < 0:
        return f"reading it ended with signal {-child.returncode}"
    if child.returncode > 0:
        return (child.stderr.strip().splitlines() or ["unreadable"])[-1]
    return ""


def check(path: Path) -> None:
    """Walk every page and use the free list. Raises lmdb.Error or ValueError, or dies.

    What the records say is checked against the segments later.
    """
    environment = open_environment(path)
    blocks = environment.open_db(BLOCKS_DB)
    with environment.begin(db=blocks) as txn, txn.cursor() as cursor:
        count = 0
        for key, record in cursor.iternext():
            if len(key) != KEY_SIZE or not record:
                raise ValueError("an entry has the wrong size")
            count += 1
        if count != txn.stat(blocks)["entries"]:
            raise ValueError("entries are missing")
    # The pages a commit takes come from the free list, which reading does not touch.
    for _ in range(2):
        with environment.begin(write=True, db=blocks) as txn:
            txn.put(_SCRATCH_KEY, b"")
            txn.delete(_SCRATCH_KEY)
    environment.close()


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]))
    except (lmdb.Error, ValueError) as error:
        sys.exit(str(error))
