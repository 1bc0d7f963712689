"""Origin `file:///directory`: a tree of files, such as a network file system.

Symbolic links to files are followed if they stay beneath the directory, or always if security.follow_symlinks is set.
Links to directories, which may form loops, and special files are left out and reported. A file's version is checked on
the open file before and after each read.

A version is a text, `size-mtime-ctime-inode`, which is kept in snapshots and is part of a block's name in the cache. It
may end early: missing parts are not compared, and snapshots of earlier releases have `size-mtime`. Size and mtime alone
do not suffice: `cp -p`, `rsync -t` and tar set any mtime, so that a file could be put together from blocks of two
versions. The ctime cannot be set, and a file that is renamed over another one has another inode. The remaining gap is a
file that is written in place within the clock tick of the file system (at most 10 ms) in which it was listed.

The root is opened for each access, which costs 2 us. A descriptor kept open would keep the file system from being
unmounted, and show the old one after another was mounted.
"""

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from cachefs.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginAccessDenied,
    OriginUnavailable,
)
from cachefs.messages import OriginOptions
from cachefs.mount_table import file_system_kinds
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, ReportProblem
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.file.confined_open import open_confined
from cachefs_daemon.origin.file.idle_threads import IdleThreads
from cachefs_daemon.origin.outage import Outage
from cachefs_daemon.origin.request_counters import OWN_COUNTERS, RequestOutcome
from cachefs_daemon.origin.retry import Failure, run_with_retries

# Clients of these file systems may make up inode numbers, which differ after the next mount or even the next access.
_UNSTABLE_INODE_KINDS: Final = ("fuse", "cifs", "smb", "9p", "overlay")
# Entries per portion: the listing of a directory with a million files shows progress and stays small in memory.
_PORTION: Final = 5000
_PARALLEL_SCANS: Final = 16
_READ: Final = OWN_COUNTERS.counters_of("file")
_LINK: Final = "is a symbolic link that leads out of the dataset, and security.follow_symlinks is not set"
# Errors of a path whose file is gone, or is no file any more.
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)


class FileTree:
    """The root of a dataset and its access rules. Used in any thread."""

    def __init__(self, root: bytes, allowed: Sequence[str], *, follow_symlinks: bool) -> None:
        """allowed: directories, one of which must contain the root and every target of a link; empty: any.
        follow_symlinks: also links that lead out of the root."""
        self.root = root
        self._allowed = [os.fsencode(os.path.normpath(path)) for path in allowed]
        self._follow = follow_symlinks

    def path(self, key: bytes) -> bytes:
        return os.path.join(self.root, key) if key else self.root

    def open(self, key: bytes, flags: int) -> int:
        """Return a descriptor of the object *key*; "" for the root.

        Raises OSError, with EXDEV if a link leads to a forbidden place, and OriginAccessDenied if the root itself is in
        no allowed directory.
        """
        with self._open_root() as root:
            if not self._follow:
                return open_confined(root, key, flags)
            fd = os.open(key or b".", flags | os.O_CLOEXEC, dir_fd=root)
        if not self._is_allowed(fd):
            os.close(fd)
            raise OSError(errno.EXDEV, "leads out of security.file_roots")
        return fd

    def has_entries(self) -> bool:
        """Return whether the root is a directory with any entry. As a dataset is never empty, an empty root is the
        mount point of a file system that is not mounted."""
        try:
            with os.scandir(self.root) as entries:
                return next(entries, None) is not None
        except OSError:
            return False

    @contextlib.contextmanager
    def _open_root(self) -> Iterator[int]:
        fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not self._is_allowed(fd):
                shown = os.fsdecode(self.root).encode("utf-8", "backslashreplace").decode()
                allowed = ", ".join(os.fsdecode(path) for path in self._allowed)
                raise OriginAccessDenied(f"{shown} is in none of security.file_roots ({allowed})")
            yield fd
        finally:
            os.close(fd)

    def _is_allowed(self, fd: int) -> bool:
        if not self._allowed:
            return True
        real = os.readlink(b"/proc/self/fd/%d" % fd)
        return _is_in(real, self._allowed) or _is_in(real, [os.path.realpath(path) for path in self._allowed])


def _is_in(path: bytes, directories: Sequence[bytes]) -> bool:
    return any(path == one or path.startswith(one.rstrip(b"/") + b"/") for one in directories)


class FileVersions:
    """Makes the versions of one listing."""

    def __init__(self, *, mtime_only: bool) -> None:
        """mtime_only: see cachefs.messages.OriginOptions."""
        self._mtime_only = mtime_only
        self._stable_devices: dict[int, bool] = {}  # by device: whether its inode numbers are stable

    def version_of(self, status: os.stat_result) -> bytes:
        if self._mtime_only:
            return b"%d-%d" % (status.st_size, status.st_mtime_ns)
        full_version = _full_version(status)
        return full_version if self._has_stable_inodes(status.st_dev) else full_version.rpartition(b"-")[0]

    def _has_stable_inodes(self, device: int) -> bool:
        if device not in self._stable_devices:
            kind = file_system_kinds().get(f"{os.major(device)}:{os.minor(device)}", "")
            self._stable_devices[device] = not kind.startswith(_UNSTABLE_INODE_KINDS)
        return self._stable_devices[device]


def is_version(status: os.stat_result, version: bytes) -> bool:
    """Return whether an open file is the listed *version*, as far as the version tells."""
    full_version = _full_version(status)
    return full_version == version or full_version.startswith(version + b"-")


def _full_version(status: os.stat_result) -> bytes:
    return b"%d-%d-%d-%d" % (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class _Scan(NamedTuple):
    """A directory while it is listed."""

    # Key of the directory, with a slash at the end; empty for the root.
    prefix: bytes
    # Descriptor of the directory, through which entries are examined. It stays open until the last entry.
    fd: int
    # Entries that are left.
    entries: "Iterator[os.DirEntry[str]]"


class _Portion(NamedTuple):
    """A listed portion of a directory."""

    objects: list[ListedObject]
    # (key, reason) of entries that cannot be listed.
    problems: list[tuple[bytes, str]]
    # Prefixes of its subdirectories, which are still to be listed.
    directories: list[bytes]
    # The rest of the directory; None at its end.
    remaining: _Scan | None


class FileOrigin:
    """A tree of files as an origin (see cachefs_daemon.origin.base.Origin)."""

    def __init__(self, url: str, options: OriginOptions, settings: OriginSettings) -> None:
        """Raises ConfigError."""
        host, slash, path_text = url.removeprefix("file://").partition("/")
        path = unquote_to_bytes(slash + path_text)
        if host not in ("", "localhost") or not slash or b"\0" in path:
            raise ConfigError(
                f"URL {url!r} needs three slashes and an absolute path, such as file:///data/images, with %25 for a "
                "percent sign"
            )
        self.url = f"file:///{path_text.strip('/')}"
        self.requests = 0
        self.errors = 0
        self.fallback_reads = 0
        self.endpoint = Endpoint(self.url, settings.max_connections, is_remote=False)
        root = os.path.normpath(path).replace(b"//", b"/")
        self._tree = FileTree(root, settings.file_roots, follow_symlinks=settings.follow_symlinks)
        self._versions = FileVersions(mtime_only=options.mtime_only)
        # Each origin has its own threads, so that a hanging file server delays no reads of another one.
        self._threads = IdleThreads(settings.max_connections, "file-origin")
        self._outage = Outage(self.url)

    def identity(self, key: bytes) -> bytes:
        return b"file:" + self._tree.path(key)

    async def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        pending = {self._threads.run(partial(self._scan, b""))}
        waiting: list[Callable[[], _Portion]] = []
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for portion in [task.result() for task in done]:
                    for key, reason in portion.problems:
                        report(key, reason)
                    if portion.remaining:
                        waiting.append(partial(self._scan_portion, portion.remaining))
                    waiting += [partial(self._scan, prefix) for prefix in portion.directories]
                    yield portion.objects
                while waiting and len(pending) < _PARALLEL_SCANS:
                    pending.add(self._threads.run(waiting.pop()))
        finally:
            for task in pending:
                task.cancel()

    async def read(self, wanted: ObjectRange, deadline: Deadline) -> bytes:
        async def attempt() -> bytes:
            self.requests += 1
            with _READ.counted_request(_outcome_of) as exchange:
                exchange.count_begin()
                data = await self._threads.run(partial(self._read, wanted))
                exchange.count_received(len(data))
            self._outage.note_response()
            return data

        subject = f"{self._display_name(wanted.key)}; is its file system reachable?"
        return await run_with_retries(attempt, self._judge, subject, deadline)

    async def close(self) -> None:
        """Return at once: a thread may hang in a dead network file system."""

    def _judge(self, error: Exception) -> Failure:
        self.errors += 1
        if isinstance(error, OSError):  # no thread could be started
            error = self._unavailable_error(b"", error)
        if not isinstance(error, CachefsError):
            raise error
        transient = isinstance(error, OriginUnavailable)
        failure = Failure(error, transient)
        self.endpoint.note_failure(self.url, failure, self._outage)
        return failure

    def _display_name(self, key: bytes) -> str:
        return os.fsdecode(self._tree.path(key)).encode("utf-8", "backslashreplace").decode()

    # --- listing, in threads ---

    def _scan(self, prefix: bytes) -> _Portion:
        try:
            fd = self._tree.open(prefix, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if not prefix:
                raise self._root_error(error) from None
            reason = _directory_problem(error)
            if reason is None:
                raise self._unavailable_error(prefix, error) from None
            return _Portion([], [(prefix, reason)], [], None)
        return self._scan_portion(_Scan(prefix, fd, os.scandir(fd)))

    def _scan_portion(self, scan: _Scan) -> _Portion:
        found = _Portion([], [], [], None)
        try:
            entries = list(islice(scan.entries, _PORTION))
            for entry in entries:
                self._examine(entry, scan.prefix + os.fsencode(entry.name), found)
        except OSError as error:
            os.close(scan.fd)
            raise self._unavailable_error(scan.prefix, error) from None
        if len(entries) == _PORTION:
            return found._replace(remaining=scan)
        os.close(scan.fd)
        return found

    def _examine(self, entry: "os.DirEntry[str]", key: bytes, found: _Portion) -> None:
        """Add *entry* to *found*."""
        try:
            is_link = entry.is_symlink()
            status = self._status_of_target(key) if is_link else entry.stat(follow_symlinks=False)
        except OSError as error:
            found.problems.append((key, _status_problem(error)))
            return
        if stat.S_ISREG(status.st_mode):
            version = self._versions.version_of(status)
            found.objects.append(ListedObject(key, status.st_size, status.st_mtime_ns, version))
        elif stat.S_ISDIR(status.st_mode) and not is_link:
            found.directories.append(key + b"/")
            found.objects.append(ListedObject(key + b"/", 0, status.st_mtime_ns, b""))
        else:
            kind = "a symbolic link to a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            found.problems.append((key, f"is {kind}"))

    def _status_of_target(self, key: bytes) -> os.stat_result:
        fd = self._tree.open(key, os.O_PATH)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _root_error(self, error: OSError) -> CachefsError:
        shown = self._display_name(b"")
        match error:
            case FileNotFoundError():
                return NotFound(f"there is no directory {shown} on this node; check the URL")
            case NotADirectoryError():
                return ConfigError(f"{shown} is not a directory; name one in {self.url}")
            case PermissionError():
                return OriginAccessDenied(f"the daemon may not read the directory {shown}")
        return self._unavailable_error(b"", error)

    # --- reading, in threads ---

    def _read(self, wanted: ObjectRange) -> bytes:
        """Read all bytes from one open file whose version is the same before and after.

        Raises OriginUnavailable for a transient failure, else another CachefsError.
        """
        try:
            fd = self._tree.open(wanted.key, os.O_RDONLY | os.O_NONBLOCK)
            try:
                self._check_version(fd, wanted)
                data = _pread(fd, wanted.length, wanted.offset)
                self._check_version(fd, wanted)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._read_error(wanted.key, error) from None
        if len(data) != wanted.length:
            raise ObjectChanged(
                f"{self._display_name(wanted.key)} is shorter than it was when listed; refresh the dataset"
            )
        return data

    def _check_version(self, fd: int, wanted: ObjectRange) -> None:
        if not is_version(os.fstat(fd), wanted.version):
            raise ObjectChanged(
                f"{self._display_name(wanted.key)} has changed since it was listed; refresh the dataset"
            )

    def _read_error(self, key: bytes, error: OSError) -> CachefsError:
        if isinstance(error, PermissionError):
            return OriginAccessDenied(f"the daemon may not read {self._display_name(key)}; check its owner and mode")
        if error.errno == errno.EXDEV:
            return OriginAccessDenied(f"{self._display_name(key)} {_LINK}")
        if error.errno in _GONE:
            if not self._tree.has_entries():
                return OriginUnavailable(
                    f"the directory {self._display_name(b'')} is gone or empty; is its file system mounted?"
                )
            return ObjectChanged(f"{self._display_name(key)} is gone since it was listed; refresh the dataset")
        return self._unavailable_error(key, error)

    def _unavailable_error(self, key: bytes, error: OSError) -> OriginUnavailable:
        return OriginUnavailable(f"{self._display_name(key)} cannot be read: {error.strerror}")


def _outcome_of(error: BaseException) -> RequestOutcome:
    return RequestOutcome.REFUSED if isinstance(error, Exception) else RequestOutcome.CANCELLED


def _directory_problem(error: OSError) -> str | None:
    """Return why a directory is left out; None if leaving it out would hide existing files."""
    if isinstance(error, PermissionError):
        return "is a directory the daemon may not read"
    if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.EXDEV:
        return "vanished while it was listed"
    return "is a directory with too long a path to be opened" if error.errno == errno.ENAMETOOLONG else None


def _status_problem(error: OSError) -> str:
    reasons = {
        errno.ENOENT: "is a broken symbolic link, or vanished",
        errno.ELOOP: "is a loop of symbolic links",
        errno.EXDEV: _LINK,
    }
    return reasons.get(error.errno or 0, f"cannot be examined: {error.strerror}")


def _pread(fd: int, length: int, offset: int) -> bytes:
    """Read *length* bytes from *offset* on; fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data
