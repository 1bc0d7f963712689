"""The version of a state directory: the file `format`, which holds one number.

The version covers all of the directory: index, jobs, mounts, members, datasets, listings. A developer who changes the
form of one of them so that an older daemon would misread it, or lose a part of it, increments FORMAT; a daemon reads
every smaller number. Jobs, mounts, members and index entries that a daemon does not understand are dropped with a line
in the log, since they are made again. Segments and snapshots are not covered, as they leave the directory: each of
their records, and each file, begins with a version of its own.
"""

import os
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError

FILE_NAME: Final = "format"
# 1: as of cachefs 0.2. Older directories have no such file.
FORMAT: Final = 1
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def check(directory: Path) -> None:
    """Raise ConfigError where a newer daemon has written the directory, OSError where the version cannot be read."""
    found = _read(directory)
    if found > FORMAT:
        raise ConfigError(
            f"a newer cachefsd has used it (its format is {found}, and this one knows {FORMAT}); install that version "
            "again, or choose another"
        )


def mark(directory: Path) -> None:
    """Write this version into the directory. Raises ConfigError, OSError."""
    if _read(directory) == FORMAT:
        return
    fresh = directory / f"{FILE_NAME}.new"
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o640)
    try:
        os.write(descriptor, b"%d\n" % FORMAT)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.rename(directory / FILE_NAME)


def _read(directory: Path) -> int:
    """Return the version; 0 where there is no such file. Raises ConfigError, OSError."""
    try:
        descriptor = os.open(directory / FILE_NAME, os.O_RDONLY | _SAFELY)
    except FileNotFoundError:
        return 0
    try:
        text = os.read(descriptor, 32).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not text.isdecimal():
        raise ConfigError(f"the file {FILE_NAME} in it holds no number; remove that file if this daemon has made it")
    return int(text)
