"""Measures processor seconds of a node's processes. User time is Python's own, system time is the kernel's."""

import resource
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psutil

from cachefs.errors import CachefsError

# Process name of the pusher.
PUSHER: Final = "pusher"
# Process name -> {"user": seconds, "system": seconds}.
Seconds = dict[str, dict[str, float]]


@contextmanager
def measure_processor_time(daemon: int, mount: int) -> Iterator[Seconds]:
    """Account for the block. The dictionary is filled when the block has ended.

    *daemon* and *mount* are process ids. The names are `daemon`, `mount` (all processes of the mount but its pusher),
    `pusher` if there is one, and `reader` (this process and its children that have ended).
    """
    seconds: Seconds = {}
    before = _seconds(daemon, mount)
    yield seconds
    after = _seconds(daemon, mount)
    for (name, kind), value in after.items():
        seconds.setdefault(name, {})[kind] = round(value - before.get((name, kind), 0), 3)


def _seconds(daemon: int, mount: int) -> dict[tuple[str, str], float]:
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    try:
        supervisor = psutil.Process(mount)
        for process in (psutil.Process(daemon), supervisor, *supervisor.children(recursive=True)):
            times = process.cpu_times()
            name = "daemon" if process.pid == daemon else PUSHER if process.name() == PUSHER else "mount"
            found[name, "user"] += times.user
            found[name, "system"] += times.system
    except psutil.NoSuchProcess as error:
        raise CachefsError(f"a process of the node has died: {error}") from None
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found["reader", "user"] += usage.ru_utime
        found["reader", "system"] += usage.ru_stime
    return found
