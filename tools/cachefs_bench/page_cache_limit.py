"""A control group whose processes share a page cache of a fixed size, whatever memory they need besides."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError

# Seconds between adjustments of the limit.
_ADJUST_SECONDS: Final = 0.05
# Bytes for the kernel's memory per process, which its statistics omit.
_KERNEL: Final = 16 << 20
_ROOT: Final = Path("/sys/fs/cgroup")


class PageCacheLimit:
    """A control group (v1 or v2) whose limit follows the memory that its processes need, so that *size* bytes are
    always left for file pages."""

    def __init__(self, size: int) -> None:
        """size: bytes. Raises CachefsError if no control group can be created."""
        self._size = size
        self._group, self._is_v1 = _create_group(f"cachefs-bench-{os.getpid()}-{id(self)}")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._adjust_forever, daemon=True)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that run it in the group."""
        return "sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "sh"

    def _adjust_forever(self) -> None:
        names = ("total_rss", "total_shmem") if self._is_v1 else ("anon", "shmem", "kernel")
        limit = self._group / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")
        while not self._ended.wait(_ADJUST_SECONDS):
            pairs = (line.split() for line in (self._group / "memory.stat").read_text().splitlines())
            needed = sum(int(value) for name, value in pairs if name in names)
            try:
                limit.write_text(str(needed + self._size + _KERNEL))
            except OSError:  # v1: the pages cannot be reclaimed at once
                continue

    @contextmanager
    def hold_limit(self) -> Iterator["PageCacheLimit"]:
        """Keep the limit meanwhile. The group is removed at the end, after its processes."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()
            try:
                self._group.rmdir()
            except OSError as error:
                raise CachefsError(f"{self._group} cannot be removed: {error.strerror}") from None


def _create_group(name: str) -> tuple[Path, bool]:
    """Create a group below this process's group. Returns its directory, and whether it is of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if not (is_v1 or controllers == ""):
            continue
        group = (_ROOT / "memory" if is_v1 else _ROOT) / path.lstrip("/") / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "memory.stat").exists():
            return group, is_v1
        group.rmdir()
    raise CachefsError(
        "no control group with a memory limit can be made here; run this as root, or leave these rows out"
    )
