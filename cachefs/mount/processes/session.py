"""The FUSE session: mounts and answers the kernel's INIT before any process that serves the mount is forked."""

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from cachefs.errors import CachefsError
from cachefs.mount import kernel, zero_open
from cachefs.mount.device import FuseConnection, clone_device, device_descriptors
from cachefs.mount.options import MountOptions
from cachefs.mount.reads.operations import Operations
from cachefs.mount.reads.reading_processes import ReadingProcesses
from cachefs.mount_spec import LATEST, MountSpec
from cachefs.mount_table import mount_source

INIT_SECONDS: Final = 20.0
# Most requests of the kernel's readahead under way at once, as in _zero_open.c, which sets the limit during INIT.
MAX_BACKGROUND_REQUESTS: Final = 2048

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FuseSession:
    """A mount ready to be served by processes."""

    operations: Operations
    # libfuse's own descriptor of the device.
    device: int
    connection: FuseConnection
    # The C code under pyfuse3 (cachefs.mount.zero_open); None where it is not used.
    library: ctypes.CDLL | None

    @property
    def is_shared(self) -> bool:
        """True where several processes may wait for its requests."""
        return self.library is not None

    def clone(self) -> int:
        """Return another descriptor of the connection, for `serve_clone`. Raises OSError."""
        return clone_device(self.device, blocking=not self.is_shared)

    def serve_clone(self, fresh: int) -> None:
        """In a forked process: serve the clone *fresh* instead of the descriptor inherited by all processes."""
        os.dup2(fresh, self.device, inheritable=False)
        os.close(fresh)


def open_session(
    spec: MountSpec, directory: Path, options: MountOptions, interposer: ctypes.CDLL | None
) -> FuseSession:
    """Mount. Raises CachefsError; then nothing is mounted."""
    operations = Operations(options)
    before = device_descriptors()
    try:
        pyfuse3.init(operations, str(directory), fuse_options(spec, options))
    except RuntimeError:
        raise CachefsError(f"cannot mount on {directory}: {explain_failure()}") from None
    try:
        if interposer is not None and not zero_open.is_active(interposer):
            raise CachefsError("zero-open did not take hold of this libfuse; mount with -o no_zero_open")
        if not trio.run(_respond_to_init, operations):
            raise CachefsError(f"the kernel sent no INIT to the mount on {directory} within {INIT_SECONDS:.0f} s")
        number = kernel.connection_number(directory)
        if number is None:
            raise CachefsError(f"{directory} was unmounted while it was being mounted")
        if interposer is not None:
            operations.kernel_opens = zero_open.kernel_opens(interposer)
            if operations.kernel_opens != zero_open.KernelOpens(files=True, directories=True):
                log.warning("this kernel cannot open everything by itself, so opens are requests to the mount")
    except BaseException:
        pyfuse3.close(unmount=True)
        raise
    (own,) = device_descriptors() - before
    session = FuseSession(operations, own, FuseConnection(number, directory), interposer)
    if interposer is None:
        session.connection.set_request_limit(MAX_BACKGROUND_REQUESTS)
    else:
        operations.count_ioctls = functools.partial(zero_open.handled_ioctls, interposer)
        operations.reading_thread = zero_open.reading_thread(interposer)
        operations.reading_processes = ReadingProcesses(operations.reading_thread)
    return session


async def _respond_to_init(operations: Operations) -> bool:
    """Answer the kernel's INIT; return False where none comes. The kernel sends INIT once, and each serving process
    needs libfuse's state after it."""
    with trio.move_on_after(INIT_SECONDS) as scope:
        operations.on_initialised = scope.cancel
        await pyfuse3.main()
    return trio.current_time() < scope.deadline


def source_text(spec: MountSpec, options: MountOptions) -> str:
    """Return the SPEC as given by the user: mount(8) compares it with a line of /etc/fstab to find a mount."""
    return str(spec).removesuffix(LATEST) if options.follow else str(spec)


def fuse_options(spec: MountSpec, options: MountOptions) -> set[str]:
    """Return libfuse's own options.

    A read-only mount keeps the kernel from dropping cached attributes after each read (atime). default_permissions lets
    the kernel check modes, which costs 7 % of a warm open+fstat+read+close (0.88 of native speed with it, 0.95 without,
    one reader). It is therefore given only where a umask removes a permission.
    """
    # libfuse would take text after a bare comma for another option.
    source = mount_source(source_text(spec, options)).replace(",", "\\,")
    libfuse_options = {"ro", f"fsname={source}", "subtype=cachefs", *options.kernel}
    if options.allow_other:
        libfuse_options.add("allow_other")
    if options.umask & 0o555:
        libfuse_options.add("default_permissions")
    return libfuse_options


def explain_failure() -> str:
    """Return the likeliest reason why libfuse could not mount, beyond its own output."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist; load the fuse module, or give the container the device"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no permission for /dev/fuse"
    if os.geteuid() != 0:
        return "fusermount3 refused; is the package fuse3 installed, and user_allow_other set for -o allow_other?"
    return "the kernel refused; a container needs CAP_SYS_ADMIN"
