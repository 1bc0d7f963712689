"""Clocks for the code that runs in a job's process.

A job may replace the functions of the module `time`, by hand or with a library for tests such as freezegun, which also
replaces references to them in all loaded modules. A wait or a budget in seconds that used the replaced functions would
never end where the job's clock stands still. The functions here belong to an instance of the module `time` that only
this module has, so the job's clock does not reach them. No other module of cachefs.hooks and cachefs.publishing imports
`time`.
"""

from collections.abc import Callable
from functools import partial
from importlib.machinery import BuiltinImporter, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, Final


def _own_time() -> ModuleType:
    """Make another instance of the module `time`, which some builds of Python have in a file."""
    spec = BuiltinImporter.find_spec("time") or PathFinder.find_spec("time")
    if spec is None or spec.loader is None:
        raise ImportError("Python has no module time", name="time")
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


_time: Final[Any] = _own_time()

# Seconds and nanoseconds of the monotonic clock. Libraries that replace time.monotonic in C spare clock_gettime.
monotonic: Final[Callable[[], float]] = partial(_time.clock_gettime, _time.CLOCK_MONOTONIC)
monotonic_ns: Final[Callable[[], int]] = partial(_time.clock_gettime_ns, _time.CLOCK_MONOTONIC)
# Processor seconds of this thread: a budget in them allows as much work on a busy machine as on an idle one.
thread_time: Final[Callable[[], float]] = partial(_time.clock_gettime, _time.CLOCK_THREAD_CPUTIME_ID)
# Seconds since 1970, like the times of files.
since_1970: Final[Callable[[], float]] = partial(_time.clock_gettime, _time.CLOCK_REALTIME)
sleep: Final[Callable[[float], None]] = _time.sleep
