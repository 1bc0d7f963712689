"""The FUSE handlers: read-only and stateless, each a look-up in a snapshot.

With zero-open the kernel sends neither OPEN nor RELEASE, and a handler's *fh* is the inode (see _zero_open.c). Without
zero-open, `open` returns the inode as the file handle, so that the handlers are the same.
"""

import errno
import functools
import itertools
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar

import pyfuse3
import trio

from cachefs.block import MAX_LOCATED_BLOCKS, block_count, describe_tiers
from cachefs.errors import CachefsError, NotFound
from cachefs.inodes import IDENTITY_ENTRY, IDENTITY_NAME, ROOT, inode_of, is_identity_link
from cachefs.mount.control import control_directory
from cachefs.mount.control.control_directory import ControlDirectory
from cachefs.mount.namespace import Namespace
from cachefs.mount.options import MountOptions
from cachefs.mount.reads.block_reader import BlockReader, Counters
from cachefs.mount.reads.reading_processes import ReadingProcesses
from cachefs.mount.zero_open import NO_KERNEL_OPENS, KernelOpens
from cachefs.snapshot import Entry, Snapshot

log = logging.getLogger(__name__)

# Seconds for which the kernel may cache entries and attributes. Snapshots never change; only a root changes that lists
# datasets, or that shows another snapshot after a refresh.
FOREVER_SECONDS: Final = 1e9
ROOT_SECONDS: Final = 1.0
MAX_NAME: Final = 255
# Extended attributes, with the option `xattr`.
ETAG: Final = b"user.cachefs.etag"
TIER: Final = b"user.cachefs.tier"
SNAPSHOT: Final = b"user.cachefs.snapshot"

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def handler(function: Handler) -> Handler:
    """Wrap a handler: count its requests, and turn each exception into an errno, since others would end the mount."""
    name = function.__name__
    kind = name if name in Counters.__slots__ else "other"

    @functools.wraps(function)
    async def handle(self: "Operations", *args: Any) -> Any:
        counters = self.counters
        counters.requests += 1
        if self._next_request is not None:
            self.wake()
        setattr(counters, kind, getattr(counters, kind) + 1)
        try:
            return await function(self, *args)
        except pyfuse3.FUSEError:
            raise
        except CachefsError as error:
            if not isinstance(error, NotFound):
                counters.errors += 1
                log.error("%s: %s", name, error)
            raise pyfuse3.FUSEError(error.errno) from None
        except Exception:
            counters.errors += 1
            log.exception("%s%r failed", name, args)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return handle  # type: ignore[return-value]


class Operations(pyfuse3.Operations):
    """Handles all requests of a mount. The public methods are those that pyfuse3 calls, one per kind of request."""

    supports_dot_lookup = True
    enable_writeback_cache = False

    # Set by `attach`.
    namespace: Namespace
    control: ControlDirectory
    reader: BlockReader

    def __init__(self, options: MountOptions) -> None:
        super().__init__()
        self.options = options
        self.counters = Counters()
        self.kernel_opens: KernelOpens = NO_KERNEL_OPENS  # set after the answer to the kernel's INIT
        # Called during the answer to the kernel's INIT, before any other request.
        self.on_initialised: Callable[[], None] = lambda: None
        # Returns the number of ioctls answered before they reached a handler (cachefs.mount.zero_open).
        self.count_ioctls: Callable[[], int] = lambda: 0
        self.reading_processes = ReadingProcesses()
        # Returns the thread that sent the current read or listing; -1 where unknown.
        self.reading_thread: Callable[[], int] = lambda: -1
        # Called with each thread that reads or lists (cachefs.mount.reads.read_records).
        self.record_reader: Callable[[int], None] = lambda thread: None
        self._next_request: trio.Event | None = None  # None while no task is in `await_request`
        # The modes of other read-only mounts of object stores: copies of files can be written to and removed.
        self._file_mode = stat.S_IFREG | (0o644 & ~options.umask)
        self._dir_mode = stat.S_IFDIR | (0o755 & ~options.umask)

    def attach(self, namespace: Namespace, control_directory: ControlDirectory, reader: BlockReader) -> None:
        """Answer requests from these objects, which must be created after the last fork: none survives a fork."""
        self.namespace = namespace
        self.control = control_directory
        self.reader = reader

    def current_counters(self) -> dict[str, int]:
        """Return the counters of this process."""
        ioctls = self.count_ioctls()
        counted = self.counters.as_dict()
        counted["ioctl"] += ioctls
        counted["requests"] += ioctls
        return counted

    async def await_request(self, seconds: float) -> None:
        """Wait for the next request or `wake`, for at most *seconds*. One task at a time may wait."""
        self._next_request = trio.Event()
        with trio.move_on_after(seconds):
            await self._next_request.wait()
        self._next_request = None

    def wake(self) -> None:
        if self._next_request is not None:
            self._next_request.set()

    def init(self) -> None:
        self.on_initialised()

    @handler
    async def lookup(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if len(name) > MAX_NAME:
            raise pyfuse3.FUSEError(errno.ENAMETOOLONG)
        if parent <= control_directory.DIRECTORY and (inode := self.control.find_inode(parent, name, ctx.pid)):
            return self._control_attributes(inode, ctx)
        if parent == ROOT and not self.namespace.is_single:
            return self._lookup_dataset(name)
        if parent == ROOT and self.namespace.has_changing_root:
            self.namespace.catch_up()
        snapshot, number = self.namespace.resolve(parent)
        if name == b".":
            entry: Entry | None = snapshot.entry(number)
        elif name == b"..":
            if number == 0 and not self.namespace.is_single:
                return self._root_attributes()
            entry = snapshot.entry(snapshot.entry(number).parent)
        else:
            entry = snapshot.lookup(number, name)
            if entry is None and name == IDENTITY_NAME and number == 0:
                return self._identity_attributes(self.namespace.inode_beside(parent, IDENTITY_ENTRY))
        return _negative_entry(self._name_timeout(parent)) if entry is None else self._named_attributes(parent, entry)

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if inode == ROOT and not self.namespace.is_single:
            return self._root_attributes()
        if control_directory.is_control(inode):
            return self._control_attributes(inode, ctx)
        if inode == ROOT and self.namespace.has_changing_root:
            return self._root_attributes()
        if is_identity_link(inode):
            return self._identity_attributes(inode)
        return self._entry_attributes(inode, self._entry(inode))

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        self._record_reading_thread()
        for position, (name, attributes) in enumerate(self._list_directory(fh, start_id), start_id + 1):
            if not pyfuse3.readdir_reply(token, name, attributes, position):
                break

    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:  # type: ignore[override]
        # The hot path: inlines `handler`, which saves a call and a setattr.
        counters = self.counters
        counters.requests += 1
        counters.read += 1
        if self._next_request is not None:
            self.wake()
        try:
            if self.reading_processes.users:
                self.reading_processes.record_read(fh, self.namespace.path)
            self._record_reading_thread()
            snapshot, number = self.namespace.resolve(fh)
            return await self.reader.read(snapshot, number, off, size)
        except CachefsError as error:
            counters.errors += 1
            log.error("read of %s at %d: %s", self._path(fh), off, error)
            raise pyfuse3.FUSEError(error.errno) from None
        except Exception:
            counters.errors += 1
            log.exception("read of inode %d at %d failed", fh, off)
            raise pyfuse3.FUSEError(errno.EIO) from None

    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        self.record_reader(ctx.pid)
        if self.kernel_opens.files:
            raise pyfuse3.FUSEError(errno.ENOSYS)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        self.record_reader(ctx.pid)
        if self.kernel_opens.directories:
            raise pyfuse3.FUSEError(errno.ENOSYS)
        return inode

    @handler
    async def readlink(self, inode: int, ctx: object) -> bytes:
        if not is_identity_link(inode):
            raise pyfuse3.FUSEError(errno.EINVAL)
        return self.namespace.resolve(inode)[0].id.encode()

    @handler
    async def access(self, inode: int, mode: int, ctx: object) -> bool:
        """Answer access(2) and chdir(2), where the kernel does not check modes itself. Denies only writing, and
        execution of a file."""
        if control_directory.is_response_fifo(inode):
            return not mode & os.X_OK
        if inode == control_directory.PUBLISH:
            return mode == os.W_OK or mode == os.F_OK
        lists = inode == control_directory.DIRECTORY or (inode == ROOT and not self.namespace.is_single)
        is_dir = lists or self._entry(inode).is_dir
        return not mode & os.W_OK and (is_dir or not mode & os.X_OK)

    @handler
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        """Report the size of all datasets shown, all of it free, since the mount takes no room on the machine."""
        snapshots = [snapshot for _, _, snapshot in self.namespace.datasets()]
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = sum(-(-snapshot.bytes // 4096) for snapshot in snapshots)
        data.f_files = sum(snapshot.files + snapshot.directories + 1 for snapshot in snapshots)
        data.f_bfree = data.f_bavail = data.f_blocks
        data.f_ffree = data.f_favail = data.f_files
        data.f_namemax = MAX_NAME
        return data

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        """Answer ENOSYS without the option `xattr`: the kernel then stops asking for attributes. `ls -l` alone would
        ask for two attributes of each file, each time."""
        self._check_attributes()
        snapshot, entry = self._snapshot_and_entry(inode)
        if name == SNAPSHOT:
            return snapshot.id.encode()
        if name == ETAG and not entry.is_dir:
            return entry.version.replace(b"\0", b"@")  # see content_version
        if name == TIER and not entry.is_dir:
            return await self._tiers_of(snapshot, entry)
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    @handler
    async def listxattr(self, inode: int, ctx: object) -> list[bytes]:
        self._check_attributes()
        try:
            _, entry = self._snapshot_and_entry(inode)
        except pyfuse3.FUSEError:
            return []
        return [SNAPSHOT] if entry.is_dir else [ETAG, TIER, SNAPSHOT]

    @handler
    async def release(self, fh: int) -> None:
        """Ignore the request, which the kernel sends only without zero-open."""

    @handler
    async def releasedir(self, fh: int) -> None:
        """Ignore the request, which the kernel sends only without zero-open."""

    @handler
    async def flush(self, fh: int) -> None:
        """Answer ENOSYS, which stops the kernel from sending FLUSH when files are closed."""
        raise pyfuse3.FUSEError(errno.ENOSYS)

    def _record_reading_thread(self) -> None:
        if (thread := self.reading_thread()) >= 0:
            self.record_reader(thread)

    def _check_attributes(self) -> None:
        if not self.options.xattr:
            raise pyfuse3.FUSEError(errno.ENOSYS)

    async def _tiers_of(self, snapshot: Snapshot, entry: Entry) -> bytes:
        located = await self.reader.locate_blocks(snapshot, entry.number, MAX_LOCATED_BLOCKS)
        return describe_tiers(located, block_count(entry.size, snapshot.block_size)).encode()

    def _path(self, inode: int) -> str:
        try:
            snapshot, number = self.namespace.resolve(inode)
            return snapshot.path(number).decode(errors="backslashreplace")
        except CachefsError:
            return f"inode {inode}"

    def _entry(self, inode: int) -> Entry:
        snapshot, number = self.namespace.resolve(inode)
        return snapshot.entry(number)

    def _snapshot_and_entry(self, inode: int) -> tuple[Snapshot, Entry]:
        """Return snapshot and entry of an inode. Raises FUSEError (no such attribute) where the inode is in no
        dataset."""
        try:
            snapshot, number = self.namespace.resolve(inode)
            return snapshot, snapshot.entry(number)
        except CachefsError:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR) from None

    def _list_directory(self, inode: int, start: int) -> Iterator[tuple[bytes, pyfuse3.EntryAttributes]]:
        if inode == ROOT and not self.namespace.is_single:
            self.namespace.catch_up()
            for name, root in itertools.islice(self.namespace.roots(), start, None):
                yield name, self._dataset_attributes(root)
            return
        if inode == control_directory.DIRECTORY:
            yield from itertools.islice(
                [(control_directory.PUBLISH_NAME, self._control_attributes(control_directory.PUBLISH))], start, None
            )
            return
        if inode == ROOT and self.namespace.has_changing_root:
            self.namespace.catch_up()
        snapshot, number = self.namespace.resolve(inode)
        for entry in snapshot.children(snapshot.entry(number), start):
            yield entry.name, self._named_attributes(inode, entry)

    def _lookup_dataset(self, name: bytes) -> pyfuse3.EntryAttributes:
        if name in (b".", b".."):
            return self._root_attributes()
        self.namespace.catch_up()
        slot = self.namespace.names.get(name)
        return _negative_entry(ROOT_SECONDS) if slot is None else self._dataset_attributes(inode_of(slot, 0))

    def _dataset_attributes(self, root: int) -> pyfuse3.EntryAttributes:
        try:
            attributes = self._entry_attributes(root, self._entry(root))
        except CachefsError as error:
            # For example with too many open files: the dataset is shown all the same; its time is known later.
            log.error("a dataset cannot be opened: %s", error)
            attributes = self._new_attributes(root, self._dir_mode, 0, self.namespace.root_changed_ns)
            attributes.attr_timeout = ROOT_SECONDS
        attributes.entry_timeout = ROOT_SECONDS
        return attributes

    def _root_attributes(self) -> pyfuse3.EntryAttributes:
        self.namespace.catch_up()
        attributes = self._new_attributes(ROOT, self._dir_mode, 0, self.namespace.root_changed_ns)
        attributes.entry_timeout = attributes.attr_timeout = ROOT_SECONDS
        return attributes

    def _control_attributes(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        """Return the attributes of the control directory or a FIFO in it. All users may write to the publish FIFO,
        unless the umask forbids it; its entry timeout of 0 makes the kernel look up its name at each open (see
        ControlDirectory). An answer FIFO belongs to the user who sent the request *ctx*."""
        fifo = stat.S_IFIFO | ((0o666 if control_directory.is_response_fifo(inode) else 0o222) & ~self.options.umask)
        mode = self._dir_mode if inode == control_directory.DIRECTORY else fifo
        attributes = self._new_attributes(inode, mode, 0, self.namespace.root_changed_ns)
        attributes.entry_timeout = 0 if inode == control_directory.PUBLISH else FOREVER_SECONDS
        if ctx is not None and control_directory.is_response_fifo(inode):
            attributes.st_uid = control_directory.file_system_user(ctx.pid, ctx.uid)
        return attributes

    def _identity_attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        """Return the attributes of the hidden link in a dataset's root that names its snapshot (cachefs.inodes)."""
        snapshot, _ = self.namespace.resolve(inode)
        mode = stat.S_IFLNK | 0o777
        attributes = self._new_attributes(inode, mode, len(snapshot.id), snapshot.entry(0).mtime_ns)
        attributes.entry_timeout = ROOT_SECONDS if self.namespace.has_changing_root else FOREVER_SECONDS
        return attributes

    def _name_timeout(self, directory: int) -> float:
        """Return for how many seconds the kernel may cache a name in *directory*."""
        return ROOT_SECONDS if directory == ROOT and self.namespace.has_changing_root else FOREVER_SECONDS

    def _named_attributes(self, directory: int, entry: Entry) -> pyfuse3.EntryAttributes:
        """Return the attributes of an *entry* found by a name in *directory*, or by "." or ".."."""
        attributes = self._entry_attributes(directory, entry)
        if attributes.st_ino == ROOT and self.namespace.has_changing_root:
            return self._root_attributes()
        attributes.entry_timeout = self._name_timeout(directory)
        return attributes

    def _entry_attributes(self, relative: int, entry: Entry) -> pyfuse3.EntryAttributes:
        """Return the attributes of *entry* in the snapshot of the inode *relative*."""
        mode = self._dir_mode if entry.is_dir else self._file_mode
        return self._new_attributes(
            self.namespace.inode_beside(relative, entry.number), mode, entry.size, entry.mtime_ns
        )

    def _new_attributes(self, inode: int, mode: int, size: int, mtime_ns: int) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = inode
        attributes.st_mode = mode
        # For a directory 1 means "unknown"; 2 would tell find(1) that there are no subdirectories.
        attributes.st_nlink = 1
        attributes.st_uid = self.options.uid
        attributes.st_gid = self.options.gid
        attributes.st_size = size
        attributes.st_blocks = -(-size // 512)
        attributes.st_mtime_ns = attributes.st_ctime_ns = attributes.st_atime_ns = mtime_ns
        attributes.entry_timeout = attributes.attr_timeout = FOREVER_SECONDS
        return attributes


def _negative_entry(seconds: float) -> pyfuse3.EntryAttributes:
    """Return a negative entry: the kernel may cache for *seconds* that there is no such name."""
    attributes = pyfuse3.EntryAttributes()
    attributes.st_ino = 0
    attributes.entry_timeout = seconds
    return attributes
