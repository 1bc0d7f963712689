"""The piece of C that `cachefs run` has the loader put into programs: an `isatty` that asks `fstat` first (_isatty.c).

It goes to the end of LD_PRELOAD, so that whatever stands there already comes first. glibc prints a line for a library
that it cannot load, and goes on. So one that is not there, or that this command could not load, is not named at all.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

VARIABLE: Final = "LD_PRELOAD"
# The loader takes these for the end of a path, or for the beginning of a variable.
_NOT_IN_A_PATH: Final = frozenset(" :$\t\n")
_HEADER: Final = 20  # bytes of an ELF file up to its machine


def library() -> Path | None:
    """The library, if it was built: that takes a C compiler when cachefs is installed."""
    paths = (Path(__file__).with_name(f"_isatty{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


def preloaded(given: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """What is to be set in the environment *given* so that *command* loads the library; nothing where it could not."""
    path = library()
    if path is None or _NOT_IN_A_PATH & set(str(path)) or not _may_load(command[0], path):
        return {}
    before = given.get(VARIABLE, "")
    if str(path) in before.replace(":", " ").split():
        return {}
    return {VARIABLE: f"{before}:{path}" if before else str(path)}


def _may_load(program: str, path: Path) -> bool:
    """Is *program* for the same kind of machine as the library, as far as it tells? A script does not."""
    found = shutil.which(program)
    theirs, ours = _machine(found), _machine(path)
    return theirs is None or theirs == ours


def _machine(path: str | os.PathLike[str] | None) -> tuple[bytes, bytes] | None:
    """Word size with byte order, and machine, of an ELF file; None for any other."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER)
    except OSError:
        return None
    return (header[4:6], header[18:20]) if header.startswith(b"\x7fELF") else None
