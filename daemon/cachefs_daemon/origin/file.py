"""Origin `file:///directory`: a tree of files, such as a network file system.

Symbolic links to files are followed. Links to directories, which may form loops, and special files are left out and
reported. A file's version is its size and mtime, checked on the open file before and after each read.
"""

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from cachefs.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginAccessDenied,
    OriginUnavailable,
)
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, Report

# Entries per portion of a directory: one of a million files is to show progress, and not to fill the memory.
_PORTION: Final = 5000
_PARALLEL_SCANS: Final = 16

Result = TypeVar("Result")


class _Scan(NamedTuple):
    """A directory that is being read."""

    # Key of the directory, with a slash at the end; empty for the root.
    prefix: bytes
    # Entries still to come.
    entries: Iterator[os.DirEntry[bytes]]


class _Portion(NamedTuple):
    """What a part of a directory contains."""

    objects: list[ListedObject]
    # (key, reason) of entries that cannot be listed.
    problems: list[tuple[bytes, str]]
    # Prefixes of the directories in it, which are still to be read.
    directories: list[bytes]
    # The entries that are left of the directory; None at its end.
    rest: _Scan | None


class FileOrigin:
    """A tree of files as an origin (see cachefs_daemon.origin.base.Origin)."""

    def __init__(self, url: str, settings: OriginSettings) -> None:
        """Raises ConfigError."""
        host, slash, rest = url.removeprefix("file://").partition("/")
        path = unquote_to_bytes(slash + rest)
        if host not in ("", "localhost") or not slash or b"\0" in path:
            raise ConfigError(f"URL {url!r} must look like file:///data/images, with %25 for a percent sign")
        self.url = f"file:///{rest.strip('/')}"
        self.requests = 0
        self.errors = 0
        self._root = os.path.normpath(path).replace(b"//", b"/")
        self._threads = ThreadPoolExecutor(settings.max_connections, thread_name_prefix="file-origin")

    def identity(self, key: bytes) -> bytes:
        return b"file:" + self._path(key)

    async def list(self, report: Report) -> AsyncIterator[list[ListedObject]]:
        pending = {self._in_thread(self._first_scan)}
        waiting: list[Callable[[], _Portion]] = []
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for portion in [task.result() for task in done]:
                    for key, reason in portion.problems:
                        report(key, reason)
                    if portion.rest:
                        waiting.append(partial(self._portion, portion.rest))
                    waiting += [partial(self._scan, prefix) for prefix in portion.directories]
                    yield portion.objects
                while waiting and len(pending) < _PARALLEL_SCANS:
                    pending.add(self._in_thread(waiting.pop()))
        finally:
            for task in pending:
                task.cancel()

    async def read(self, wanted: ObjectRange, deadline: float) -> bytes:
        self.requests += 1
        try:
            async with asyncio.timeout(deadline):
                return await self._in_thread(partial(self._read, wanted))
        except TimeoutError:
            self.errors += 1
            raise OriginUnavailable(
                f"reading {self._shown(wanted.key)} took over {deadline:.0f} s; is its file system reachable?"
            ) from None
        except CachefsError:
            self.errors += 1
            raise

    async def close(self) -> None:
        # Not waited for: a thread may hang in a dead network file system.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _in_thread(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _path(self, key: bytes) -> bytes:
        return os.path.join(self._root, key) if key else self._root

    def _shown(self, key: bytes) -> str:
        return os.fsdecode(self._path(key)).encode("utf-8", "backslashreplace").decode()

    # --- listing, in threads ---

    def _first_scan(self) -> _Portion:
        try:
            return self._portion(_Scan(b"", os.scandir(self._root)))
        except FileNotFoundError:
            raise NotFound(f"there is no directory {self._shown(b'')}; see {self.url}") from None
        except NotADirectoryError:
            raise ConfigError(f"{self._shown(b'')} is not a directory; name one in {self.url}") from None
        except PermissionError:
            raise OriginAccessDenied(f"the daemon may not read the directory {self._shown(b'')}") from None
        except OSError as error:
            raise self._unavailable(b"", error) from None

    def _scan(self, prefix: bytes) -> _Portion:
        try:
            return self._portion(_Scan(prefix, os.scandir(self._path(prefix))))
        except PermissionError:
            return _Portion([], [(prefix, "is a directory the daemon may not read")], [], None)
        except (FileNotFoundError, NotADirectoryError):
            return _Portion([], [(prefix, "vanished while it was listed")], [], None)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return _Portion([], [(prefix, "is a directory with too long a path to be opened")], [], None)
            raise self._unavailable(prefix, error) from None

    def _portion(self, scan: _Scan) -> _Portion:
        found = _Portion([], [], [], None)
        entries = list(islice(scan.entries, _PORTION))
        for entry in entries:
            key = scan.prefix + entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    found.directories.append(key + b"/")
                    found.objects.append(ListedObject(key + b"/", 0, entry.stat().st_mtime_ns, b""))
                    continue
                status = entry.stat()
            except OSError as error:
                found.problems.append((key, _why_no_status(error)))
                continue
            if stat.S_ISREG(status.st_mode):
                found.objects.append(ListedObject(key, status.st_size, status.st_mtime_ns, _version(status)))
            else:
                kind = "a symbolic link to a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
                found.problems.append((key, f"is {kind}"))
        return found._replace(rest=scan) if len(entries) == _PORTION else found

    # --- reading, in threads ---

    def _read(self, wanted: ObjectRange) -> bytes:
        try:
            fd = os.open(self._path(wanted.key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._check_version(fd, wanted)
                data = _pread(fd, wanted.length, wanted.offset)
                self._check_version(fd, wanted)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._read_error(wanted.key, error) from None
        if len(data) != wanted.length:
            raise ObjectChanged(f"{self._shown(wanted.key)} is shorter than it was when listed; refresh the dataset")
        return data

    def _check_version(self, fd: int, wanted: ObjectRange) -> None:
        if _version(os.fstat(fd)) != wanted.version:
            raise ObjectChanged(f"{self._shown(wanted.key)} has changed since it was listed; refresh the dataset")

    def _read_error(self, key: bytes, error: OSError) -> CachefsError:
        if isinstance(error, PermissionError):
            return OriginAccessDenied(f"the daemon may not read {self._shown(key)}; check its owner and mode")
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR):
            if not os.path.isdir(self._root):
                return OriginUnavailable(f"the directory {self._shown(b'')} is gone; is its file system mounted?")
            return ObjectChanged(f"{self._shown(key)} is gone since it was listed; refresh the dataset")
        return self._unavailable(key, error)

    def _unavailable(self, key: bytes, error: OSError) -> OriginUnavailable:
        return OriginUnavailable(f"{self._shown(key)} cannot be read: {error.strerror}")


def _version(status: os.stat_result) -> bytes:
    return b"%d-%d" % (status.st_size, status.st_mtime_ns)


def _why_no_status(error: OSError) -> str:
    reasons = {errno.ENOENT: "is a broken symbolic link, or vanished", errno.ELOOP: "is a loop of symbolic links"}
    return reasons.get(error.errno or 0, f"cannot be examined: {error.strerror}")


def _pread(fd: int, length: int, offset: int) -> bytes:
    """*length* bytes from *offset* on; fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data
