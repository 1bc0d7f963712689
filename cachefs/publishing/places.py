"""Which paths lie below a cachefs mount."""

import os
from collections.abc import Sequence

from cachefs.mount_table import MountPoint, mount_points


class Places:
    """The cachefs mounts there are now, and a memory of which of them directories belong to.

    Only directories are resolved (symbolic links, `..`), each once: a link to a file is not followed.
    """

    def __init__(self, points: Sequence[MountPoint] | None = None) -> None:
        points = mount_points() if points is None else points
        # The longest first: mounts may lie below each other.
        self._points = sorted(points, key=lambda point: -len(str(point.path)))
        self._known: dict[str, MountPoint | None] = {}

    def __bool__(self) -> bool:
        """Is there any mount?"""
        return bool(self._points)

    def mount_of(self, path: str) -> MountPoint | None:
        """The mount that the file *path* is below."""
        directory = path[: path.rfind("/") + 1]
        try:
            return self._known[directory]
        except KeyError:
            found = self._known[directory] = self._search(directory)
            return found

    def _search(self, directory: str) -> MountPoint | None:
        real = os.path.realpath(directory) + "/"
        for point in self._points:
            if real.startswith(str(point.path).rstrip("/") + "/"):
                return point
        return None
