"""The files of one `file://` dataset: opened beneath its root, and nowhere else.

The root is opened for each look at it. A descriptor that stays open would keep its file system from being unmounted,
and show the old one after another was mounted. It costs 2 us.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

from cachefs.errors import OriginAccessDenied
from cachefs_daemon.origin.beneath import open_beneath


class FileTree:
    """Used in any thread."""

    def __init__(self, root: bytes, allowed: Sequence[str], *, follow_symlinks: bool) -> None:
        """allowed: directories of which one must have the root in it, and what is opened through links; empty: any.
        follow_symlinks: also those that lead out of the root."""
        self.root = root
        self._allowed = [os.fsencode(os.path.normpath(path)) for path in allowed]
        self._follow = follow_symlinks

    def path(self, key: bytes) -> bytes:
        return os.path.join(self.root, key) if key else self.root

    def open(self, key: bytes, flags: int) -> int:
        """A descriptor of the object *key*; empty for the root.

        Raises OSError, with EXDEV where a link leads where it must not, and OriginAccessDenied where the root itself
        is not in an allowed directory.
        """
        with self._opened_root() as root:
            if not self._follow:
                return open_beneath(root, key, flags)
            fd = os.open(key or b".", flags | os.O_CLOEXEC, dir_fd=root)
        if not self._is_allowed(fd):
            os.close(fd)
            raise OSError(errno.EXDEV, "leads out of security.file_roots")
        return fd

    def is_there(self) -> bool:
        """Whether the root is a directory with anything in it. A dataset is never empty. So an empty root is the mount
        point of a file system that is not mounted."""
        try:
            with os.scandir(self.root) as entries:
                return next(entries, None) is not None
        except OSError:
            return False

    @contextlib.contextmanager
    def _opened_root(self) -> Iterator[int]:
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
