"""Finds the line of the job's code where a DataLoader was made.

torch's `DataLoader.__init__` looks up `check_worker_number_rationality` of itself in the end, where a descriptor
examines the callers. Libraries make loaders too, and classes are derived from DataLoader; the creation site is the
first line, going outwards, that belongs to no installed package.
"""

import os
import sys
import sysconfig
import weakref
from types import FrameType, MethodType
from typing import Any, Final

from cachefs.publishing.channel import warn_once
from cachefs.publishing.job_exceptions import is_from_job

# Maximum number of frames examined, and maximum length of a creation site in characters.
_DEPTH: Final = 64
_MAX_CHARACTERS: Final = 200
# The directories of Python and of its installed packages.
_INSTALLED: Final = tuple(
    {
        os.path.join(path, "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class CreationDescriptor:
    """Descriptor in place of `DataLoader.check_worker_number_rationality`."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __get__(self, loader: Any, kind: Any = None) -> Any:
        if loader is None:
            return self._method
        try:
            if sys._getframe(1).f_code.co_name == "__init__":  # torch also looks the method up for each epoch
                record_site(loader, sys._getframe(1))
        except Exception as error:  # no failure here may end the job
            if is_from_job(error):
                raise
            warn_once(f"cannot tell where a DataLoader was made ({error!r})")
        return MethodType(self._method, loader)


# Keyed by identity, since a loader may compare equal to another.
_sites: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}


def record_site(loader: Any, frame: FrameType) -> None:
    """Record where the loader is being made. frame: of its `__init__`."""
    number = id(loader)
    _sites[number] = (weakref.ref(loader, lambda _: _forget(number)), job_lines(frame))


def _forget(number: int) -> None:
    known = _sites.get(number)
    if known is not None and known[0]() is None:
        del _sites[number]


def site_of(loader: Any) -> tuple[str, ...]:
    """Return the lines of the job's own code that made the loader, such as `train.py:41`, the innermost first."""
    known = _sites.get(id(loader))
    return known[1] if known is not None and known[0]() is loader else ()


def job_lines(frame: FrameType | None) -> tuple[str, ...]:
    """Return the lines of the job's own code from this frame outwards; without any, the line of the caller."""
    found: list[str] = []
    nearest = ""
    inside = True  # within the `__init__` of the loader, or of a derived class
    for _ in range(_DEPTH):
        if frame is None:
            break
        inside = inside and frame.f_code.co_name == "__init__"
        if not inside:
            line = _line(frame)
            nearest = nearest or line
            if _is_of_the_job(frame.f_code.co_filename):
                found.append(line)
        frame = frame.f_back
    return tuple(found) or ((nearest,) if nearest else ())


def _is_of_the_job(path: str) -> bool:
    return not path.startswith("<") and not path.startswith(_INSTALLED) and not any(part in path for part in _PACKAGES)


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)[:_MAX_CHARACTERS]}:{frame.f_lineno}"
