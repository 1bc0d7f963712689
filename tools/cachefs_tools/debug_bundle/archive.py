"""The file of a bundle: a tar.gz readable by its owner only, written atomically."""

import gzip
import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cachefs.errors import AlreadyExists, CachefsError

MODE: Final = 0o600


def require_new(path: Path) -> None:
    """Raise AlreadyExists if there is a file at *path*."""
    if os.path.lexists(path):
        raise AlreadyExists(f"{path} exists already; name another file with -o")


def write_archive(path: Path, top: str, files: Mapping[str, str]) -> int:
    """Write *files* (name -> text) into a new file at *path*, below the directory *top*. Returns its bytes. Raises
    AlreadyExists if the file exists, CachefsError if it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        try:
            with os.fdopen(descriptor, "wb") as raw:
                os.fchmod(raw.fileno(), MODE)  # independent of the umask
                with gzip.GzipFile(fileobj=raw, mode="wb", filename="") as packed:
                    _add_files(packed, top, files)
                size = raw.tell()
            os.link(draft, path)  # unlike rename, fails for an existing file
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError:
        raise AlreadyExists(f"{path} exists already; name another file with -o") from None
    except OSError as error:
        raise CachefsError(f"{path} cannot be written: {error.strerror}") from None
    return size


def _add_files(packed: gzip.GzipFile, top: str, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        for name, text in files.items():
            content = text.encode("utf-8", "backslashreplace")
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mode, member.mtime = len(content), MODE, int(time.time())
            tar.addfile(member, io.BytesIO(content))
