"""Opens the files of one `file://` dataset beneath its root.

The root is opened for each access, which costs 2 us. A descriptor kept open would keep the file system from being
unmounted, and show the old one after another was mounted.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

from cachefs.errors import OriginAccessDenied
from cachefs_daemon.origin.confined_open import open_confined


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
