"""System calls for mounts that libc does not have everywhere: openat2(2), and fsopen(2) with its relatives.

A mount made with fsopen(2) is attached to no directory until `attach_mount`, and lasts as long as its descriptor is
open.
"""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

# The calls have these numbers on every architecture.
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_OPENAT2: Final = 437
_NO_MAGIC_LINKS: Final = 0x02  # RESOLVE_NO_MAGICLINKS
_OPEN_HOW: Final = struct.Struct("QQQ")  # flags, mode, resolve
_CLOSE_ON_EXEC: Final = 1  # FSOPEN_CLOEXEC, and FSMOUNT_CLOEXEC
_SET_FLAG: Final = 0  # FSCONFIG_SET_FLAG
_SET_STRING: Final = 1  # FSCONFIG_SET_STRING
_CREATE: Final = 6  # FSCONFIG_CMD_CREATE
_NO_SOURCE_PATH: Final = 0x04  # MOVE_MOUNT_F_EMPTY_PATH
_BENEATH: Final = 0x200  # MOVE_MOUNT_BENEATH, Linux 6.5
_AT_FDCWD: Final = -100
_libc: Final = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: object) -> int:
    """Make system call *number*. Raises OSError."""
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def new_mount(kind: str, options: dict[str, str | None] | None = None, attributes: int = 0) -> int:
    """Return a descriptor of a new mount of the file system *kind*, attached to no directory.

    options: name -> value, None for flags; attributes: MOUNT_ATTR_ bits. Raises OSError.
    """
    context = system_call(_FSOPEN, kind.encode(), _CLOSE_ON_EXEC)
    try:
        for name, value in (options or {}).items():
            command, text = (_SET_FLAG, None) if value is None else (_SET_STRING, os.fsencode(value))
            system_call(_FSCONFIG, context, command, name.encode(), text, 0)
        system_call(_FSCONFIG, context, _CREATE, None, None, 0)
        return system_call(_FSMOUNT, context, _CLOSE_ON_EXEC, attributes)
    finally:
        os.close(context)


def attach_mount(mount: int, directory: bytes, *, beneath: bool = False) -> None:
    """Attach a mount of `new_mount` to *directory*: over the mounts there, or *beneath* the topmost one.

    Raises OSError.
    """
    system_call(_MOVE_MOUNT, mount, b"", _AT_FDCWD, directory, _NO_SOURCE_PATH | (_BENEATH if beneath else 0))


def leads_through_magic_link(path: Path) -> bool:
    """Return whether *path* has a link that the kernel resolves by itself, such as /proc/self/root, whose text does not
    tell its target. Does not access a mount at *path*. False where the kernel (before 5.6) cannot tell."""
    how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, _NO_MAGIC_LINKS)
    try:
        os.close(system_call(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how)))
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
