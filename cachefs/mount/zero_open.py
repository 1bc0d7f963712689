"""Loads the C code for zero-open (see _zero_open.c), before pyfuse3 is imported."""

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from cachefs.extras import DISTRIBUTION

# FUSE_CAP_NO_OPEN_SUPPORT (Linux 3.16) and FUSE_CAP_NO_OPENDIR_SUPPORT (Linux 5.1).
_CAN_OPEN_FILES: Final = 1 << 17
_CAN_OPEN_DIRECTORIES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class KernelOpens:
    """The kinds of opens that the kernel does by itself after the mount's ENOSYS; any other open would then fail."""

    files: bool
    directories: bool


NO_KERNEL_OPENS: Final = KernelOpens(False, False)


class ZeroOpenUnavailable(Exception):
    """Zero-open is not possible here; the text says what is missing and how to get it."""


def load_interposer() -> ctypes.CDLL:
    """Put the interposer in front of libfuse3. Raises ZeroOpenUnavailable."""
    if "pyfuse3" in sys.modules:
        raise ZeroOpenUnavailable("pyfuse3 was imported before zero-open could be set up")
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_zero_open{suffix}")
        if path.exists():
            try:
                return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise ZeroOpenUnavailable(f"{path} cannot be loaded ({error}); reinstall {DISTRIBUTION}") from None
    raise ZeroOpenUnavailable(
        f"its C piece was not built; install a C compiler, pkg-config and libfuse3-dev, then reinstall {DISTRIBUTION}"
    )


def is_active(library: ctypes.CDLL) -> bool:
    """Return whether the interposer is active in the session. To be called after pyfuse3.init."""
    return bool(library.cachefs_zero_open_active())


def kernel_opens(library: ctypes.CDLL) -> KernelOpens:
    """Return the abilities that the kernel announced in INIT."""
    can: int = library.cachefs_kernel_can()
    return KernelOpens(bool(can & _CAN_OPEN_FILES), bool(can & _CAN_OPEN_DIRECTORIES))


def reading_thread(library: ctypes.CDLL) -> Callable[[], int]:
    """Return a function that returns the thread of the read being taken (cachefs.mount.reads.reading_processes)."""
    return functools.partial(getattr, ctypes.c_int.in_dll(library, "cachefs_reading_thread"), "value")


def handled_ioctls(library: ctypes.CDLL) -> int:
    """Return how many ioctls this process has answered in C."""
    count: int = library.cachefs_ioctls()
    return count
