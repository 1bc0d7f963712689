"""Processor seconds of a node's processes, Python's own (user) and the kernel's (system)."""

import resource
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psutil

from cachefs.errors import CachefsError

PUSHER: Final = "cachefs.mount.push"
Seconds = dict[str, dict[str, float]]


@contextmanager
def accounted(daemon: int, mount: int) -> Iterator[Seconds]:
    """{process: {"user", "system"}} while the block ran, once it has: the daemon; the mount's processes; their pusher,
    where there is one; and we ourselves, with the children that have ended. daemon, mount: process ids."""
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
            name = "daemon" if process.pid == daemon else "pusher" if PUSHER in process.cmdline() else "mount"
            found[name, "user"] += times.user
            found[name, "system"] += times.system
    except psutil.NoSuchProcess as error:
        raise CachefsError(f"a process of the node has died: {error}") from None
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found["reader", "user"] += usage.ru_utime
        found["reader", "system"] += usage.ru_stime
    return found
