"""The FUSE session: mounted, and greeted by the kernel, before any process that will serve it is forked."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from cachefs.errors import CachefsError
from cachefs.mount import kernel, zero_open
from cachefs.mount.device import Connection, clone, descriptors
from cachefs.mount.operations import Operations
from cachefs.mount.options import MountOptions
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import source_of

INIT_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Session:
    """device: libfuse's own descriptor of it; shared: may several processes wait for its requests?"""

    operations: Operations
    device: int
    connection: Connection
    shared: bool

    def clone(self) -> int:
        """Another descriptor of the connection, for `use`. Raises OSError."""
        return clone(self.device, blocking=not self.shared)

    def use(self, fresh: int) -> None:
        """In a forked process: serve *fresh* in the place of the descriptor all have inherited."""
        os.dup2(fresh, self.device, inheritable=False)
        os.close(fresh)


def open_session(spec: MountSpec, directory: Path, options: MountOptions, interposer: ctypes.CDLL | None) -> Session:
    """Mount. Raises CachefsError, with nothing mounted."""
    operations = Operations(options)
    before = descriptors()
    try:
        pyfuse3.init(operations, str(directory), fuse_options(spec, options))
    except RuntimeError:
        raise CachefsError(f"cannot mount on {directory}: {why_not()}") from None
    try:
        if interposer is not None and not zero_open.is_active(interposer):
            raise CachefsError("zero-open did not take hold of this libfuse; mount with -o no_zero_open")
        if not trio.run(_answer_init, operations):
            raise CachefsError(f"the kernel has not greeted the mount on {directory} within {INIT_SECONDS:.0f} s")
        number = kernel.connection_number(directory)
        if number is None:
            raise CachefsError(f"{directory} was unmounted while it was being mounted")
    except BaseException:
        pyfuse3.close(unmount=True)
        raise
    (own,) = descriptors() - before
    return Session(operations, own, Connection(number, directory), interposer is not None)


async def _answer_init(operations: Operations) -> bool:
    """Each process needs what libfuse makes of the kernel's INIT, which is sent once."""
    with trio.move_on_after(INIT_SECONDS) as scope:
        operations.when_initialised = scope.cancel
        await pyfuse3.main()
    return trio.current_time() < scope.deadline


def fuse_options(spec: MountSpec, options: MountOptions) -> set[str]:
    """libfuse's own options.

    Read-only keeps the kernel from dropping cached attributes after each read (atime). default_permissions lets the
    kernel check modes, which costs 7 % of a warm open+fstat+read+close (0.88 of native with it, 0.95 without, one
    reader); so it is asked for only where a umask makes modes deny anything.
    """
    # libfuse would take what follows a bare comma for an option of its own.
    source = source_of(str(spec)).replace(",", "\\,")
    given = {"ro", f"fsname={source}", "subtype=cachefs", *options.kernel}
    if options.allow_other:
        given.add("allow_other")
    if options.umask & 0o555:
        given.add("default_permissions")
    return given


def why_not() -> str:
    """The likeliest reason that libfuse would not mount, after what it has printed itself."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist; load the fuse module, or give the container the device"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no permission for /dev/fuse"
    if os.geteuid() != 0:
        return "fusermount3 refused; is the package fuse3 installed, and user_allow_other set for -o allow_other?"
    return "the kernel refused; a container needs CAP_SYS_ADMIN"
