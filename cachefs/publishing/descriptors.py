"""Descriptors that cachefs keeps open in the job's process between two of its own calls.

The job may close any number, such as by `os.closerange`, and open a file of its own that gets the same number. A
descriptor is therefore remembered with the device and inode of its file, and its number is used only as long as both
are the same. Nothing is closed when Python collects an object: only the end of the process closes descriptors.
"""

import os
from typing import Final

from cachefs.publishing.job_exceptions import is_from_job


def file_identity(fd: int) -> tuple[int, int] | None:
    """Return device and inode of the open file with this number; None where no file is open."""
    try:
        found = os.fstat(fd)
    except OSError as error:
        if is_from_job(error):
            raise
        return None
    return found.st_dev, found.st_ino


class OwnDescriptor:
    """An open descriptor that is valid as long as the job leaves it alone."""

    __slots__ = ("_fd", "_identity")

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self._identity = file_identity(fd)

    @property
    def number(self) -> int | None:
        """Return the number of the descriptor; None once it was closed, also by the job."""
        if self._identity is None or file_identity(self._fd) != self._identity:
            self._identity = None
            return None
        return self._fd

    def close(self) -> None:
        """Close the descriptor, unless its number belongs to another file by now."""
        number = self.number
        self._identity = None
        if number is not None:
            os.close(number)
