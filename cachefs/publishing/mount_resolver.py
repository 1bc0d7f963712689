"""Resolves paths to cachefs mounts."""

from collections.abc import Sequence
from typing import Any, Final

from cachefs.mount_table import MountPoint, mount_points
from cachefs.publishing.job_exceptions import real_path

# Maximum number of directories remembered: some 20 MB.
MAX_DIRECTORIES: Final = 1 << 16
_UNRESOLVED: Final[Any] = object()


class MountResolver:
    """The cachefs mounts of one moment. Each directory is resolved once (symbolic links, `..`), and the result is kept;
    a link to a file is not followed."""

    def __init__(self, points: Sequence[MountPoint] | None = None) -> None:
        """points: the mounts; None for the present ones."""
        points = mount_points() if points is None else points
        # The longest path comes first, since one mount may lie below another.
        self._points = sorted(points, key=lambda point: -len(str(point.path)))
        self._known: dict[str, MountPoint | None] = {}  # directory, with a slash at the end -> its mount

    def __bool__(self) -> bool:
        """Return whether there is any mount."""
        return bool(self._points)

    def mount_of(self, path: str) -> MountPoint | None:
        """Return the mount that contains the file *path*; None where no mount does."""
        directory = path[: path.rfind("/") + 1]
        found: MountPoint | None = self._known.get(directory, _UNRESOLVED)
        if found is _UNRESOLVED:
            if len(self._known) >= MAX_DIRECTORIES:
                self._known.clear()
            found = self._known[directory] = self._find_mount(directory)
        return found

    def _find_mount(self, directory: str) -> MountPoint | None:
        real = real_path(directory) + "/"
        for point in self._points:
            if real.startswith(str(point.path).rstrip("/") + "/"):
                return point
        return None
