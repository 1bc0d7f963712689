"""Distinguishes exceptions of the job from those of cachefs, where code of cachefs runs in the job's process.

Python runs a signal handler of the job between any two instructions of the main thread, also between those of cachefs.
An exception of the handler comes out of cachefs' own functions and belongs to the job, so code that catches its own
failures raises it again: `except Exception as error: if is_from_job(error): raise`. This applies to `except OSError`
too, as handlers of timeouts raise TimeoutError. Only code that runs in a process of cachefs (the helper) is exempt.

`os.path.exists`, `realpath` and the like swallow any OSError or ValueError, so `mode_of` and `real_path` replace them.

Limit: a signal handler or trace function that discards its frame argument looks like a function of cachefs.
"""

import contextlib
import os
import sys
from types import FrameType, TracebackType
from typing import Final

# Flag of functions that have `*arguments` (inspect.CO_VARARGS, whose module is slow to import).
CO_VARARGS: Final = 4
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Packages whose exceptions arise in C code that cachefs calls, besides the standard library's.
_CALLED_LIBRARIES: Final = frozenset({"cachefs", "datasets", "numpy", "pyarrow", "streaming", "torch", "webdataset"})


def is_from_job(error: BaseException) -> bool:
    """Return whether the job raised this exception, which the caller has just caught.

    The job did where a signal handler or a trace function did, or another thread, by PyThreadState_SetAsyncExc. Code of
    the job that cachefs calls itself does not count.
    """
    traceback = error.__traceback__
    outer: FrameType | None = None
    has_other_code = False
    while traceback is not None:
        frame = traceback.tb_frame
        if outer is not None and _is_argument(frame, outer):
            return True
        is_known = frame.f_code.co_filename.startswith(_PACKAGE) or _is_called_library(frame.f_globals.get("__name__"))
        has_other_code |= not is_known
        outer, traceback = frame, traceback.tb_next
    return outer is not None and not has_other_code and not _is_called_library(type(error).__module__)


def _is_called_library(module: object) -> bool:
    """Return whether a module is of cachefs, of the standard library or of a library that cachefs calls."""
    package = module.partition(".")[0] if type(module) is str else ""
    return package in sys.stdlib_module_names or package in _CALLED_LIBRARIES


def _is_argument(frame: FrameType, outer: FrameType) -> bool:
    """Return whether *outer*, the frame in which *frame* began, is an argument of *frame*, as the interrupted frame is
    of signal handlers and trace functions."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)]
    values = [frame.f_locals.get(name) for name in names]
    return any(value is outer or (type(value) is tuple and any(one is outer for one in value)) for value in values)


def mode_of(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Return the type and mode of a file, as `os.stat` does; 0 without a file. follow: follow symbolic links."""
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except (OSError, ValueError) as error:
        if is_from_job(error):
            raise
        return 0


def real_path(path: str) -> str:
    """Return the path without symbolic links, or as it is where it does not exist."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if is_from_job(error):
            raise
        return path.rstrip("/")


class suppress_own(contextlib.suppress):
    """Suppresses exceptions of these types, as contextlib.suppress does, unless the job raised them."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        return bool(super().__exit__(kind, error, at)) and error is not None and not is_from_job(error)
