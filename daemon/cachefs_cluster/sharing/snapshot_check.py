"""Validates a snapshot file received from a peer, in a child process.

Reading a file that only looks like an LMDB database can kill the reading process. So a child (`python -m
cachefs_cluster.sharing.snapshot_check`) reads it: it gets one path in a line of JSON, and answers in another with the
file's facts or its fault. It computes the snapshot's id anew from all records (1.2 s for a million files) and checks
each name, so that a valid file holds what the listing node has listed.
"""

import asyncio
import contextlib
import hashlib
import struct
import sys
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from cachefs.errors import CachefsError, SnapshotDamaged
from cachefs.snapshot import INODE_DB, MAX_DBS, META_DB, META_KEY, NUMBER, PROBLEM_DB, SnapshotMeta, unseal, verify
from cachefs.snapshot_builder import MAX_NAME, MAX_SIZE

# Timeout of one check: this many seconds, plus one for each BYTES_PER_SECOND of the file (a quiet machine takes 0.01
# s); and seconds after which an idle child ends.
CHECK_SECONDS: Final = 900.0
BYTES_PER_SECOND: Final = 1 << 20
IDLE_SECONDS: Final = 10.0
_MAX_LINE: Final = 1 << 20

# Layout of a record of `cachefs.snapshot`: kind and length of the name; then the size of a file; then the name.
_KIND: Final = struct.Struct("<BB")
_SIZE: Final = struct.Struct("<Q")
_SIZE_AT: Final = 18
_NAME_AT: Final = (34, 42)  # of a directory, of a file
_FILE: Final = 1


class _CheckResult(msgspec.Struct, frozen=True):
    meta: SnapshotMeta | None = None
    problem: str = ""


class SnapshotChecker:
    """Runs the child and sends it files to check. Used on the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    async def check(self, path: Path, size: int) -> SnapshotMeta:
        """Return the facts in the file, verified. size: of the file. Raises SnapshotDamaged."""
        async with self._lock:
            if self._end_timer is not None:
                self._end_timer.cancel()
            try:
                async with asyncio.timeout(CHECK_SECONDS + size / BYTES_PER_SECOND):
                    result = await self._query_child(path)
            except (TimeoutError, OSError, ValueError, msgspec.MsgspecError) as error:
                await self.close()
                raise SnapshotDamaged(f"{path.name} cannot be read: {error or 'it takes too long'}") from None
            except BaseException:
                await self.close()
                raise
            self._end_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_child)
        if result.meta is None:
            raise SnapshotDamaged(result.problem)
        return result.meta

    async def _query_child(self, path: Path) -> _CheckResult:
        child = self._child
        if child is None or child.returncode is not None:
            child = self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "cachefs_cluster.sharing.snapshot_check",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
            )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(str(path)) + b"\n")
        line = await child.stdout.readline()
        if not line:
            raise ValueError(f"the process that checks it has ended with status {await child.wait()}")
        return msgspec.json.decode(line, type=_CheckResult)

    def _end_child(self) -> None:
        if self._child is not None and self._child.stdin is not None and not self._lock.locked():
            self._child.stdin.close()  # the child ends at the end of its input
            self._child = None

    async def close(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def verify_snapshot(path: Path) -> SnapshotMeta:
    """Return the facts in the file, verified. Raises SnapshotDamaged, CachefsError."""
    verify(path)
    try:
        env = lmdb.open(str(path), readonly=True, lock=False, subdir=False, readahead=True, max_dbs=MAX_DBS)
        try:
            return _verify_entries(env)
        finally:
            env.close()
    except (lmdb.Error, struct.error, msgspec.MsgspecError, OSError) as error:
        raise SnapshotDamaged(f"it is not a snapshot: {error}") from None


def _verify_entries(env: Any) -> SnapshotMeta:
    inode, problem, meta_db = (env.open_db(name, create=False) for name in (INODE_DB, PROBLEM_DB, META_DB))
    with env.begin() as txn:
        payload = unseal(0, txn.get(META_KEY, b"", db=meta_db))
        if payload is None:
            raise SnapshotDamaged("its metadata is missing or damaged")
        meta = msgspec.msgpack.decode(payload, type=SnapshotMeta)
        digest = hashlib.blake2b(b"%d %b\0" % (meta.block_size, meta.url.encode()), digest_size=16)
        count = 0
        with txn.cursor(inode) as cursor:
            for number, (key, record) in enumerate(cursor):
                sealed = unseal(number, record)
                if sealed is None or key != NUMBER.pack(number):
                    raise SnapshotDamaged(f"entry {number} is missing or does not match its checksum")
                _check_entry(number, sealed)
                digest.update(record)
                count += 1
        with txn.cursor(problem) as cursor:
            for _, record in cursor:
                digest.update(record)
    if digest.hexdigest() != meta.id:
        raise SnapshotDamaged(f"its id is {meta.id}, but its content has the digest {digest.hexdigest()}")
    if count != 1 + meta.files + meta.directories or meta.block_size <= 0:
        raise SnapshotDamaged(
            f"it has {count} entries, but its metadata counts {meta.files} files and {meta.directories} directories"
        )
    return meta


def _check_entry(number: int, record: bytes) -> None:
    """Raise SnapshotDamaged for an entry that no listing makes."""
    kind, length = _KIND.unpack_from(record)
    start = _NAME_AT[kind == _FILE]
    name = record[start : start + length]
    fits = not name if number == 0 else 0 < len(name) == length <= MAX_NAME
    if not fits or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise SnapshotDamaged(f"entry {number} has an invalid name")
    if kind == _FILE and _SIZE.unpack_from(record, _SIZE_AT)[0] > MAX_SIZE:
        raise SnapshotDamaged(f"entry {number} has an invalid size")


def main() -> None:
    """Check files in the child, until its standard input ends."""
    for line in sys.stdin.buffer:
        try:
            result = _CheckResult(meta=verify_snapshot(Path(msgspec.json.decode(line, type=str))))
        except (CachefsError, OSError) as error:
            result = _CheckResult(problem=str(error))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
