"""Checks before a mount begins: registers it with its daemon, and refuses a directory that overlaps a `file://` origin.

A missing daemon or an unknown dataset is then an error of the command instead of a mount that hangs. A child process
makes the call, since a process that has used gRPC must not fork any more.

The daemon reads a `file://` origin by its path. A mount on or above the origin would make the daemon read the mount,
which asks the daemon. A mount below the origin would cover its files, and the next refresh would list the mount. Paths
are compared after links are resolved, and also by their place in the file system, since a mount on one of two bind
mounts is often made on the other too. File systems served by a server are not accessed, since the server may be down
while its files are cached here; links on them are not resolved.
"""

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote_to_bytes

import trio

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import DatasetView, MountReport, NodeView
from cachefs.mount.child_process import fork
from cachefs.mount.options import MountOptions
from cachefs.mount.reads import fetch_channel
from cachefs.mount_table import file_system_location, resolve_locally
from cachefs.rpc import REPORT, DaemonClient, encode, response_decoder

_SCHEME: Final = "file://"
# Places of a directory: in the tree that programs see, and on its device.
_DirectoryLocations = tuple[tuple[str, PurePosixPath], ...]
_TIMEOUT: Final = 5.0
# The first byte of the child's answer. After it comes the daemon's reply, or the text of the error.
_OK: Final = b"+"
_ERROR: Final = b"-"


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
                f"{directory} is in the origin of {name} ({url}), so a mount there would cover its files; choose "
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
    device, path_on_device = file_system_location(path)
    return ("/", PurePosixPath(path)), (device, PurePosixPath(path_on_device))


def _is_in(inner: _DirectoryLocations, outer: _DirectoryLocations) -> bool:
    return any(
        device == other_device and path.is_relative_to(other)
        for (device, path), (other_device, other) in zip(inner, outer, strict=True)
    )


def register_mount(options: MountOptions, report: MountReport) -> NodeView:
    """Report the mount to the daemon. Returns the daemon's view of its node. Raises CachefsError."""
    reader, writer = os.pipe()

    def call_daemon() -> None:
        try:
            response = _OK + encode(_call_daemon(options, report))
        except CachefsError as error:
            response = _ERROR + str(error).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(response)

    pid = fork("attach", Path(report.mountpoint), call_daemon)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        response = pipe.read()
    os.waitpid(pid, 0)
    if response.startswith(_OK):
        return response_decoder(NodeView)(response[1:])
    raise CachefsError(response[1:].decode() or "the process that asked the daemon has died; see the log")


def _call_daemon(options: MountOptions, report: MountReport) -> NodeView:
    """Call until the daemon answers, for at most `daemon_wait` seconds: at boot it may start later. Raises
    CachefsError."""
    client = DaemonClient(options.socket)
    deadline = time.monotonic() + options.daemon_wait
    while True:
        try:
            view = client.call(REPORT, report, timeout=_TIMEOUT)
            # Fails here rather than at the first read where the daemon does not serve blocks.
            trio.run(fetch_channel.check_daemon, options.socket)
            return view
        except DaemonUnavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
