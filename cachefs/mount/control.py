"""`.cachefs/publish`: where a program in any language says what it is going to read, by writing lines of JSON.

It is a FIFO, since the kernel lets nobody write to a regular file of a read-only mount. The kernel moves the bytes. We
only see that a name is looked up; then a process of the mount opens the FIFO as any program would, and reads it until
all writers have closed it (cachefs.mount.control_process). It is not kept open, since that would keep the mount busy,
so that nobody could unmount it. Answers go through further FIFOs, of which each caller names one
(cachefs.control_calls): nothing is kept for them, as the name says the inode number. Such a FIFO belongs to the user
who has looked its name up first. The kernel keeps that with the inode as long as the caller has the FIFO open, and the
process that reads the control file asks the kernel whose it is: so it knows who calls, which no line could prove.

This is what the workers have to do with it: any of them may be asked for the name.
"""

import os
import re
from pathlib import Path
from typing import Final

from cachefs.control_calls import TOKEN_BITS, token_in
from cachefs.inodes import ROOT
from cachefs.mount import process
from cachefs.mount.namespace import Namespace

# Inode numbers, which are smaller than those of any snapshot.
DIRECTORY: Final = 2
PUBLISH: Final = 3
# The FIFO with token t for answers has the inode number _ANSWERS + t.
_ANSWERS: Final = 4
_BEYOND: Final = _ANSWERS + (1 << TOKEN_BITS)
# The last of the four user ids of a thread (proc_pid_status(5)).
_FILE_SYSTEM_USER: Final = re.compile(rb"^Uid:(?:\s+\d+){3}\s+(\d+)$", re.MULTILINE)
DIRECTORY_NAME: Final = b".cachefs"
PUBLISH_NAME: Final = b"publish"


def is_control(inode: int) -> bool:
    """Is it the control directory, or a FIFO in it?"""
    return DIRECTORY <= inode < _BEYOND


def is_answers(inode: int) -> bool:
    """Is it a FIFO for answers?"""
    return _ANSWERS <= inode < _BEYOND


def fifo_path(mountpoint: Path) -> Path:
    return mountpoint / os.fsdecode(DIRECTORY_NAME) / os.fsdecode(PUBLISH_NAME)


class Control:
    """The control directory of one mount."""

    def __init__(self, namespace: Namespace, wanted: int) -> None:
        """wanted: an eventfd of the mount, which is set where somebody wants to write to the FIFO."""
        self._namespace = namespace
        self._wanted = wanted

    def find(self, parent: int, name: bytes, thread: int) -> int:
        """The inode of *name* in the directory *parent*, 0 where that is not ours. A dataset's own `.cachefs` comes
        first. thread: of whoever asks.
        """
        if parent == DIRECTORY:
            if name == PUBLISH_NAME:
                if not process.is_sibling(thread):
                    os.eventfd_write(self._wanted, 1)
                return PUBLISH
            if (token := token_in(name)) is not None:
                # Only a caller makes a FIFO for answers: it would else belong to the mount.
                return 0 if process.is_sibling(thread) else _ANSWERS + token
            return {b".": DIRECTORY, b"..": ROOT}.get(name, 0)
        if parent != ROOT or name != DIRECTORY_NAME:
            return 0
        if self._namespace.single:
            snapshot, number = self._namespace.resolve(ROOT)
            if snapshot.lookup(number, name) is not None:
                return 0
        return DIRECTORY


def user_of(thread: int, user: int) -> int:
    """Returns the user id with which a thread opens files. *user* is what the kernel says with the request, which is
    right but behind a shield: an overlayfs asks with the rights of the user who has mounted it."""
    try:
        status = Path(f"/proc/{thread}/status").read_bytes()
    except OSError:  # it is in another pid namespace, or has ended
        return user
    found = _FILE_SYSTEM_USER.search(status)
    return int(found[1]) if found else user
