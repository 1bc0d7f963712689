"""Finds the request that kills workers, and has it answered with EIO.

A worker that dies leaves its requests to the next worker, which would die of the same request. The C code under pyfuse3
(_zero_open.c) therefore notes the number of the request that each worker took last, in memory shared with the
supervisor. When a worker crashes or its loop stands still, that request is the likely cause. After the second worker
that a request has killed, all workers answer it with EIO.
"""

import ctypes
import logging
import mmap
from collections import OrderedDict
from typing import Final

log = logging.getLogger(__name__)

# Most requests that all workers refuse at a time; CONDEMNED in _zero_open.c.
CONDEMNED: Final = 8
# Workers that one request may kill before it is refused.
MAX_DEATHS: Final = 2
# Most requests that are remembered for having killed a worker.
_MAX_SUSPECTS: Final = 64
_NUMBER: Final = 8  # bytes


class PoisonRequests:
    """Counts the workers that each request has killed, in shared memory. To be created before the workers are
    forked."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, (CONDEMNED + workers) * _NUMBER)
        self._numbers = (ctypes.c_uint64 * (CONDEMNED + workers)).from_buffer(self._memory)
        self._deaths: OrderedDict[int, int] = OrderedDict()  # request number -> workers it has killed
        self._refused = 0  # requests condemned so far

    def track_requests(self, library: ctypes.CDLL, worker: int) -> None:
        """In a worker: start to note the requests that the worker takes. library: see cachefs.mount.zero_open."""
        self._numbers[CONDEMNED + worker] = 0
        library.cachefs_note_requests(ctypes.byref(self._numbers), worker)

    def latest_requests(self) -> tuple[int, ...]:
        """Return the number of the request that each worker took last."""
        return tuple(self._numbers[CONDEMNED:])

    def record_death(self, worker: int) -> None:
        """In the supervisor: record that *worker* has crashed or that its loop stands still."""
        request = self._numbers[CONDEMNED + worker]
        self._numbers[CONDEMNED + worker] = 0
        if not request:
            return
        self._deaths[request] = self._deaths.pop(request, 0) + 1
        if len(self._deaths) > _MAX_SUSPECTS:
            self._deaths.popitem(last=False)
        if self._deaths[request] == MAX_DEATHS:
            log.error("request %d has cost %d workers, and fails with EIO", request, MAX_DEATHS)
            self._numbers[self._refused % CONDEMNED] = request
            self._refused += 1
