"""The control directory `.cachefs` of a mount: programs in any language publish by writing JSON lines to `publish`.

`publish` is a FIFO, since the kernel does not allow writes to a regular file of a read-only mount. The workers of the
mount only see a look-up of the name. A process of the mount (cachefs.mount.processes.control_process) then opens the
FIFO, and reads until all writers have closed it. The FIFO is not kept open, since an open file would prevent an
unmount. Answers go through further FIFOs, one named by each caller (cachefs.control_calls). They need no state: the
name determines the inode number.

An answer FIFO belongs to the user who first looked its name up. The kernel keeps the owner with the inode as long as
the caller has the FIFO open. The process that reads the control file asks the kernel for that owner: it authenticates
the caller, which no content of a line could.

This module is the workers' part: any worker may be asked for the names.
"""

import os
import re
from pathlib import Path
from typing import Final

from cachefs.control_calls import TOKEN_BITS, parse_fifo_token
from cachefs.inodes import ROOT
from cachefs.mount import child_process
from cachefs.mount.namespace import Namespace

# Inode numbers, all smaller than those of any snapshot.
DIRECTORY: Final = 2
PUBLISH: Final = 3
# The answer FIFO with token t has the inode number _RESPONSES + t.
_RESPONSES: Final = 4
_END: Final = _RESPONSES + (1 << TOKEN_BITS)
# The last of the four user ids of a thread (proc_pid_status(5)).
_FILE_SYSTEM_USER: Final = re.compile(rb"^Uid:(?:\s+\d+){3}\s+(\d+)$", re.MULTILINE)
DIRECTORY_NAME: Final = b".cachefs"
PUBLISH_NAME: Final = b"publish"


def is_control(inode: int) -> bool:
    """Return whether *inode* is the control directory or a FIFO in it."""
    return DIRECTORY <= inode < _END


def is_response_fifo(inode: int) -> bool:
    """Return whether *inode* is an answer FIFO."""
    return _RESPONSES <= inode < _END


def fifo_path(mountpoint: Path) -> Path:
    return mountpoint / os.fsdecode(DIRECTORY_NAME) / os.fsdecode(PUBLISH_NAME)


class ControlDirectory:
    """The control directory of one mount."""

    def __init__(self, namespace: Namespace, wakeup: int) -> None:
        """wakeup: an eventfd of the mount, set when a program is about to write to the FIFO."""
        self._namespace = namespace
        self._wakeup = wakeup

    def find_inode(self, parent: int, name: bytes, thread: int) -> int:
        """Return the inode of *name* in directory *parent*, or 0 where the name is not part of the control directory.

        A dataset's own `.cachefs` takes precedence. thread: id of the calling thread.
        """
        if parent == DIRECTORY:
            if name == PUBLISH_NAME:
                if not child_process.is_sibling(thread):
                    os.eventfd_write(self._wakeup, 1)
                return PUBLISH
            if (token := parse_fifo_token(name)) is not None:
                # Only a caller may create an answer FIFO: after a look-up by the mount, the mount would own the FIFO.
                return 0 if child_process.is_sibling(thread) else _RESPONSES + token
            return {b".": DIRECTORY, b"..": ROOT}.get(name, 0)
        if parent != ROOT or name != DIRECTORY_NAME:
            return 0
        if self._namespace.is_single:
            snapshot, number = self._namespace.resolve(ROOT)
            if snapshot.lookup(number, name) is not None:
                return 0
        return DIRECTORY


def file_system_user(thread: int, user: int) -> int:
    """Return the user id with which *thread* opens files.

    *user* is the id that the kernel sent with the request. Behind a shield that id is wrong: an overlayfs sends
    requests with the credentials of the user who mounted it.
    """
    try:
        status = Path(f"/proc/{thread}/status").read_bytes()
    except OSError:  # the thread is in another pid namespace, or has ended
        return user
    found = _FILE_SYSTEM_USER.search(status)
    return int(found[1]) if found else user
