"""Reads that wait for a block now, and why blocks could not be had: what the node's list of troubles is made of."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.troubles import Cause, cause_of
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.endpoint import Endpoint

# Pairs of a snapshot and a cause that are kept: those that were seen last.
KEPT: Final = 64
# Times of failed reads that are kept of each pair.
MOST_TIMES: Final = 1024


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A block, or a part of one, that reads wait for."""

    key: bytes
    # Id of the snapshot for whose sake it is fetched.
    snapshot: str
    # The server that its origin is on.
    endpoint: Endpoint
    # Loop time at which the first of the reads has begun to wait.
    since: float
    # May a request for it be under way? Else it waits until there may be one more.
    has_slot: bool
    # Names of other nodes that were asked for it and have not answered.
    peers: tuple[str, ...] = ()
    # Why the last attempt has failed.
    trouble: CachefsError | None = None
    # Does it come for another node, so that no read of this node waits?
    is_for_peer: bool = False


@dataclass(slots=True)
class ReadFailure:
    """Blocks of one snapshot that could not be had for one cause."""

    snapshot: str
    cause: Cause
    # Unix time in seconds of the first and of the last one.
    first: float
    last: float
    # How many of them reads have waited for.
    waited: int = 0
    # What was said of the last one.
    message: str = ""
    # Unix times of the last MOST_TIMES of those that reads have waited for.
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))

    def waited_since(self, moment: float) -> int:
        """Counts those that reads have waited for since a unix time."""
        return self.waited if moment <= self.first else sum(when >= moment for when in self.times)


class ReadFailures:
    """Keeps why blocks could not be had, for the last KEPT pairs. Used on the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, Cause], ReadFailure] = OrderedDict()  # the last one at the end

    def add(self, source: BlockSource, error: CachefsError, now: float, *, waited: bool) -> None:
        """A block could not be had. now: unix time in seconds; waited: have reads waited for the block?"""
        key = source.snapshot, cause_of(error.errno)
        known = self._known.pop(key, None) or ReadFailure(*key, first=now, last=now)
        text, subject = str(error), source.subject
        known.last, known.message = now, text if subject in text else f"{subject}: {text}"
        if waited:
            known.waited += 1
            known.times.append(now)
        self._known[key] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    def all(self) -> list[ReadFailure]:
        """Return all pairs, first the one that was seen last."""
        return list(reversed(self._known.values()))
