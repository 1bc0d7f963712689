"""Opens a directory of the daemon, and makes sure that no other user can plant files in it.

A start trusts what it finds in its directories: records in segments, entries of an index. And it writes there with its
own rights. So a directory that another user has made, or can write to, is refused: the memory tier's default is in a
directory where all users may create one. Directories above are not checked: a user who can write there can take the
directory away, but cannot put one of ours in its place.

Where a disk is not mounted, its mount point is an empty directory of the disk below, and files created there would fill
that disk: so a directory below such a mount point is refused too.
"""

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.mount_table import mounted_paths

FSTAB: Final = Path("/etc/fstab")
# Members of the socket's group read the files; they need not write.
_MODE: Final = 0o750
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def is_mounted(point: Path) -> bool:
    """Return whether a file system is mounted on *point*."""
    return os.path.realpath(point) in mounted_paths()


def missing_mount(directory: Path, fstab: Path = FSTAB) -> Path | None:
    """Return a mount point in *fstab* above *directory* on which nothing is mounted."""
    real = Path(os.path.realpath(directory))
    above = (point for point in _points(fstab) if directory.is_relative_to(point) or real.is_relative_to(point))
    return next((point for point in above if not is_mounted(point)), None)


def _points(fstab: Path) -> list[Path]:
    """Return the mount points in *fstab*; none where it cannot be read."""
    try:
        lines = fstab.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = (line.split() for line in lines if not line.lstrip().startswith("#"))
    points = (Path(os.path.normpath(_unescaped(each[1]))) for each in fields if len(each) > 1)
    return [point for point in points if point.is_absolute() and point != Path("/")]


def _unescaped(field: str) -> str:
    r"""Decode a field of fstab(5): a space is written as \040, and a tab as \011."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


@dataclass(frozen=True, slots=True)
class ConfiguredDirectory:
    """A directory in the configuration."""

    setting: str  # name in messages, such as "[ssd] dir"
    path: Path
    required_mount: Path | None = None  # a mount point on which a file system must be mounted

    def unusable_error(self, reason: str) -> ConfigError:
        """Return the error for a directory that cannot be used, in one line."""
        return ConfigError(f"{self.setting} {self.path} cannot be used: {reason}")


def open_owned(directory: ConfiguredDirectory) -> int:
    """Return a descriptor of the directory, which is created if missing. Raises ConfigError where it is unusable."""
    _require_mounts(directory)
    try:
        descriptor = _open(directory, make=True)
    except OSError as error:
        raise directory.unusable_error(_unusable_reason(directory, error)) from None
    try:
        _require_ours(directory, os.fstat(descriptor))
        _keep_group_out(descriptor)
    except (ConfigError, OSError) as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise directory.unusable_error(f"{error.strerror}; make it a writable directory") from None
        raise
    return descriptor


def problems(directory: ConfiguredDirectory, *, any_owner: bool = False, coming: Path | None = None) -> Iterator[str]:
    """Yield the reasons for which `open_owned` would refuse the directory, without creating it. any_owner: accept any
    owner; coming: a directory that will exist by then."""
    try:
        _require_mounts(directory)
        descriptor = _open(directory, make=False)
        try:
            found = os.fstat(descriptor)
            _require_ours(directory, found, found.st_uid if any_owner else None)
        finally:
            os.close(descriptor)
    except ConfigError as error:
        yield str(error)
    except FileNotFoundError as error:
        if directory.path.parent == coming:
            return
        if not directory.path.parent.is_dir():
            yield str(directory.unusable_error(_unusable_reason(directory, error)))
        elif not os.access(directory.path.parent, os.W_OK | os.X_OK):
            yield str(
                directory.unusable_error(f"user {user_name(os.geteuid())} may not make it in {directory.path.parent}")
            )
    except (OSError, ValueError) as error:
        yield str(directory.unusable_error(_unusable_reason(directory, error)))


def _require_mounts(directory: ConfiguredDirectory) -> None:
    if directory.required_mount is not None and not is_mounted(directory.required_mount):
        raise directory.unusable_error(f"nothing is mounted on {directory.required_mount}, which is required; mount it")
    point = missing_mount(directory.path)
    if point is not None:
        raise directory.unusable_error(
            f"nothing is mounted on {point}, though it is in {FSTAB}; mount it, or take it out of there"
        )


def _open(directory: ConfiguredDirectory, *, make: bool) -> int:
    """Raises OSError, ConfigError."""
    try:
        return _open_or_follow(directory)
    except FileNotFoundError:
        # Only the directory itself: where its parents are missing, the path is mistyped or its disk is not mounted.
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        directory.path.mkdir(mode=_MODE)
    return _open_or_follow(directory)


def _open_or_follow(directory: ConfiguredDirectory) -> int:
    """Open the directory. Only symbolic links of root and of the daemon's user are followed."""
    try:
        return os.open(directory.path, _FLAGS | os.O_NOFOLLOW)
    except OSError:
        link = directory.path.lstat()
        if not stat.S_ISLNK(link.st_mode):
            raise
        if link.st_uid not in (0, os.geteuid()):
            raise directory.unusable_error(
                f"it is a symbolic link of user {user_name(link.st_uid)}; remove it, or choose another"
            ) from None
    return os.open(directory.path, _FLAGS)


def _require_ours(directory: ConfiguredDirectory, found: os.stat_result, owner: int | None = None) -> None:
    us = os.geteuid() if owner is None else owner
    if found.st_uid != us:
        raise directory.unusable_error(
            f"it belongs to user {user_name(found.st_uid)}; the daemon, which runs as {user_name(us)}, would have to "
            "trust its content; remove it, or choose another, or chown -R it if you trust its content"
        )
    if found.st_mode & stat.S_IWOTH:
        raise directory.unusable_error(
            f"any user may write to it (mode {stat.S_IMODE(found.st_mode):04o}); choose a new directory in it, or "
            "chmod it to 0750 if only cachefs uses it"
        )


def _keep_group_out(descriptor: int) -> None:
    """Remove the group's write access, which earlier versions gave (0770), except on a read-only disk. Raises
    OSError."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & stat.S_IWGRP and not os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        os.fchmod(descriptor, mode & ~stat.S_IWGRP)


def _unusable_reason(directory: ConfiguredDirectory, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError) and not directory.path.parent.exists():
        return f"{directory.path.parent} does not exist (is its disk mounted?); make it, or choose another"
    return f"{getattr(error, 'strerror', None) or error}; make it a writable directory, or choose another"


def user_name(uid: int) -> str:
    """Return the user's name and number, for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
