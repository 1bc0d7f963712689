"""In which line of the job's code a DataLoader was made.

torch's `DataLoader.__init__` looks up `check_worker_number_rationality` of itself in the end: a descriptor looks who
has called it. Libraries make loaders too, and classes are derived from DataLoader; the line that is named is the first
one, going outwards, that belongs to no installed package.
"""

import os
import sys
import sysconfig
import weakref
from types import FrameType, MethodType
from typing import Any, Final

from cachefs.publishing.channel import warn
from cachefs.publishing.foreign import is_foreign

# Frames that are looked at, and characters that are told of a place.
_DEPTH: Final = 64
_MOST: Final = 200
# The directories of Python and of what is installed for it.
_INSTALLED: Final = tuple(
    {
        os.path.join(path, "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Created:
    """`DataLoader.check_worker_number_rationality`."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __get__(self, loader: Any, kind: Any = None) -> Any:
        if loader is None:
            return self._method
        try:
            if sys._getframe(1).f_code.co_name == "__init__":  # torch looks it up for each epoch too
                note(loader, sys._getframe(1))
        except Exception as error:  # whatever is wrong here is no reason to end the job
            if is_foreign(error):
                raise
            warn(f"cannot tell where a DataLoader was made ({error!r})")
        return MethodType(self._method, loader)


# By identity, since a loader may say that it equals another.
_places: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}


def note(loader: Any, frame: FrameType) -> None:
    """The loader is being made. frame: of its `__init__`."""
    number = id(loader)
    _places[number] = (weakref.ref(loader, lambda _: _forget(number)), places_of(frame))


def _forget(number: int) -> None:
    known = _places.get(number)
    if known is not None and known[0]() is None:
        del _places[number]


def place_of(loader: Any) -> tuple[str, ...]:
    """The lines of the job's own code that have made the loader, such as `train.py:41`, the innermost first; empty
    where nobody knows."""
    known = _places.get(id(loader))
    return known[1] if known is not None and known[0]() is loader else ()


def places_of(frame: FrameType | None) -> tuple[str, ...]:
    """The lines of the job's own code from this frame outwards; where there are none, the line that has called."""
    found: list[str] = []
    nearest = ""
    inside = True  # of the `__init__` of the loader, or of a class that is derived from it
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
    return f"{os.path.basename(frame.f_code.co_filename)[:_MOST]}:{frame.f_lineno}"
