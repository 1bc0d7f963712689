"""Refuses a mount whose directory overlaps the `file://` origin of a dataset.

The daemon reads such an origin by its path. A mount on or above the origin would make the daemon read the mount, which
asks the daemon. A mount below the origin would cover its files, and the next refresh would list the mount.

Paths are compared after links are resolved, and also by their place in the file system, since a mount on one of two
bind mounts is often made on the other too. File systems served by a server are not accessed, since the server may be
down while its files are cached here; links on them are not resolved.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote_to_bytes

from cachefs.errors import CachefsError
from cachefs.messages import DatasetView
from cachefs.mount_table import file_system_location, resolve_locally

_SCHEME: Final = "file://"
# Places of a directory: in the tree that programs see, and on its device.
_DirectoryLocations = tuple[tuple[str, PurePosixPath], ...]


def check_apart_from_origins(directory: Path, shown: Sequence[DatasetView], others: Sequence[DatasetView]) -> None:
    """Raise CachefsError where a mount on *directory*, a path without links, is on or above the origin of any dataset,
    or below the origin of a shown dataset. others: further datasets of the node."""
    names: dict[str, str] = {}  # by URL, since a shown dataset may be among the others too
    for dataset in (*shown, *others):
        names.setdefault(dataset.url, dataset.name)
    shown_urls = {dataset.url for dataset in shown}
    here = _locations_of(directory)
    for url, name in names.items():
        origin = _origin_directory(url)
        if origin is None:
            continue
        there = _locations_of(origin)
        if _is_in(there, here):
            raise CachefsError(
                f"a mount on {directory} would cover the origin of {name} ({url}), which the daemon reads; choose "
                "another directory"
            )
        if url in shown_urls and _is_in(here, there):
            raise CachefsError(
                f"{directory} is in the origin of {name} ({url}), so a mount there would cover what is listed; choose "
                "a directory outside of it"
            )


def _origin_directory(url: str) -> Path | None:
    """Return the directory of a `file://` origin, with links resolved as far as no server is accessed. None for other
    origins, and for a directory that does not exist here, as where the daemon is in a container."""
    if not url.startswith(_SCHEME):
        return None
    path = os.path.normpath("/" + os.fsdecode(unquote_to_bytes(url.removeprefix(_SCHEME))).lstrip("/"))
    try:
        return Path(resolve_locally(path))
    except ValueError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        return Path(os.path.normpath(error.filename)) if error.errno == errno.EXDEV else Path(path)


def _locations_of(path: Path) -> _DirectoryLocations:
    """Return the places of *path*. Reads the table of mounts."""
    device, place = file_system_location(path)
    return ("/", PurePosixPath(path)), (device, PurePosixPath(place))


def _is_in(inner: _DirectoryLocations, outer: _DirectoryLocations) -> bool:
    return any(
        device == other_device and path.is_relative_to(other)
        for (device, path), (other_device, other) in zip(inner, outer, strict=True)
    )
