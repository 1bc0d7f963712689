"""Files of certificates: what is wrong with one, and whether others have taken its place."""

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

# Of each file its mtime, inode and size; None for one that is not there.
FilesState = tuple[tuple[int, int, int] | None, ...]


def why_unusable(error: Exception) -> str:
    """In words, what loading the files into an SSLContext has raised."""
    if isinstance(error, ssl.SSLError):
        return f"not what PEM files of TLS have in them, or they do not belong together ({error.reason or error})"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def files_state(paths: Sequence[Path | None]) -> FilesState:
    """What changes when one of the files does. None in the place of a path: no file is meant."""
    return tuple(_state(path) if path is not None else None for path in paths)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size
