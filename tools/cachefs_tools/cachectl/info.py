"""cachectl info: describes a file or directory of a mount."""

import os
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import RenderableType

from cachefs.errors import NotFound
from cachefs.messages import Empty, FileInfo, FilePath, MountView
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import MountPoint, mount_points
from cachefs.rpc import DATASET_LIST, FILE_SHOW, STATUS
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import labelled_lines, size
from cachefs_tools.escaped_names import escape_name


@click.command()
@click.argument("path")
@with_session
def info(session: CommandSession, path: str) -> None:
    """Show details of PATH, a file or directory below a mount.

    Its dataset and snapshot, its version at the origin, and in which tier each of its blocks is.
    """
    point, inside = find_mount(path)
    spec = MountSpec.parse(point.spec).resolve_url(session.call(DATASET_LIST, Empty()).datasets)
    mounts = session.call(STATUS, Empty()).mounts
    found = session.call(FILE_SHOW, requested_file(point, spec, inside, mounts))
    session.print_result(found, *info_lines(found))


def find_mount(path: str) -> tuple[MountPoint, bytes]:
    """Return the mount of *path*, and the path within the mount. Accesses no mount unless *path* has symbolic links.
    Raises NotFound."""
    for place in (os.path.abspath(path), os.path.realpath(path)):
        for point in sorted(mount_points(), key=lambda point: len(point.path.parts), reverse=True):
            if Path(place).is_relative_to(point.path):
                return point, os.fsencode(os.path.normpath(f"{point.root}/{Path(place).relative_to(point.path)}"))
    raise NotFound(f"{escape_name(path)} is in no mount of cachefs; `cachectl mounts` shows what is mounted")


def requested_file(point: MountPoint, spec: MountSpec, inside: bytes, mounts: list[MountView]) -> FilePath:
    """Return the file at the path *inside* of the mount *point* of *spec*. mounts: those that the daemon knows. Raises
    NotFound."""
    relative = inside.strip(b"/")
    if spec.is_single:
        (part,) = spec.datasets
        living = [one for one in mounts if one.alive and MountSpec.parse(one.spec).has_named(part.name)]
        here = [one for one in living if one.mountpoint == str(point.path)] or living
        return FilePath(dataset=part.name, path=relative, snapshot=part.digits or (here[0].snapshot if here else ""))
    dataset, _, rest = relative.partition(b"/")
    if not dataset:
        raise NotFound(f"{point.path} is a mount of several datasets; name one, or something in it")
    digits = next((part.digits for part in spec.datasets if part.name == os.fsdecode(dataset)), "")
    return FilePath(dataset=os.fsdecode(dataset), path=rest, snapshot=digits or "")


def info_lines(found: FileInfo) -> list[RenderableType]:
    """Return the lines of `info`."""
    rows = [
        ("dataset", f"{found.dataset}@{found.snapshot}"),
        ("path", escape_name(found.path) + "/" * found.directory if found.path else "/"),
    ]
    if not found.directory:
        rows += [
            ("size", f"{size(found.size)} ({found.size:,} bytes)"),
            ("modified", datetime.fromtimestamp(found.mtime_ns / 1e9, UTC).astimezone().isoformat(" ", "seconds")),
            ("etag", escape_name(found.etag)),
            ("tiers", found.tiers or "no blocks"),
        ]
    return [labelled_lines(rows)]
