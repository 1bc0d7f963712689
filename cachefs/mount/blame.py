"""Which request has killed a worker: a request that kills one worker after the other is answered with an error.

A worker that dies leaves its requests to the next one, which would die of the same request, and so on. So the piece of
C under pyfuse3 (_zero_open.c) notes, in memory that the supervisor shares with its workers, the number of the request
that each worker took last. Where a worker crashed or its loop stood still, that is the request it was working on, or
most likely so. The second worker that it costs is the last one: all workers then answer it with EIO.
"""

import ctypes
import logging
import mmap
from collections import OrderedDict
from typing import Final

log = logging.getLogger(__name__)

# Requests that no worker takes any more, at most; CONDEMNED in _zero_open.c.
CONDEMNED: Final = 8
# Workers that a request may cost.
MOST_DEATHS: Final = 2
# Requests that have cost a worker and are remembered.
_SUSPECTS: Final = 64
_NUMBER: Final = 8  # bytes


class Blame:
    """The shared memory, and what the supervisor makes of it. To be made before the workers are forked."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, (CONDEMNED + workers) * _NUMBER)
        self._numbers = (ctypes.c_uint64 * (CONDEMNED + workers)).from_buffer(self._memory)
        self._deaths: OrderedDict[int, int] = OrderedDict()  # number of a request -> workers it has cost
        self._condemned = 0  # how many were condemned so far

    def note_requests(self, library: ctypes.CDLL, worker: int) -> None:
        """In a worker: have the requests noted that it takes. library: see cachefs.mount.zero_open."""
        self._numbers[CONDEMNED + worker] = 0
        library.cachefs_note_requests(ctypes.byref(self._numbers), worker)

    def requests(self) -> tuple[int, ...]:
        """The numbers of the requests that the workers took last."""
        return tuple(self._numbers[CONDEMNED:])

    def died(self, worker: int) -> None:
        """In the supervisor: a worker has crashed, or its loop stands still."""
        request = self._numbers[CONDEMNED + worker]
        self._numbers[CONDEMNED + worker] = 0
        if not request:
            return
        self._deaths[request] = self._deaths.pop(request, 0) + 1
        if len(self._deaths) > _SUSPECTS:
            self._deaths.popitem(last=False)
        if self._deaths[request] == MOST_DEATHS:
            log.error("request %d has cost %d workers, and fails with EIO", request, MOST_DEATHS)
            self._numbers[self._condemned % CONDEMNED] = request
            self._condemned += 1
