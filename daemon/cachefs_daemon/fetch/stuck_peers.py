"""Peers that live and do not give: they take questions, and blocks do not come while a reader waits.

As with a daemon that hangs behind a peer server that is well, or a disk that hangs. Probes get through to such a node,
so it does not count as dead, and each reader would wait for it anew.
"""

from collections.abc import Callable
from typing import Final

from cachefs_daemon.runtime.backoff import Backoff

# Questions in a row that were not answered in time, until a peer is left out.
MOST_LATE: Final = 2
# Seconds until it is asked again, once: at first, and at most. It is doubled each time.
FIRST_PAUSE: Final = 2.0
LONGEST_PAUSE: Final = 60.0


class StuckPeers:
    """By id of the node, and by what it is asked for: it may give what it has, and not bring what it does not have.
    Times are of one clock."""

    def __init__(self) -> None:
        self._late: dict[tuple[str, bool], Backoff] = {}

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget those of which *is_known* says no by their id: they have left the cluster."""
        self._late = {key: one for key, one in self._late.items() if is_known(key[0])}

    def may_ask(self, node: str, now: float, *, fetch: bool) -> bool:
        """Is it worth a try?"""
        late = self._late.get((node, fetch))
        return late is None or late.failures < MOST_LATE or late.is_due(now)

    def asked(self, node: str, now: float, *, fetch: bool) -> None:
        """It is asked. While it is left out, nobody else tries at the same time."""
        late = self._late.get((node, fetch))
        if late is not None and late.failures >= MOST_LATE:
            late.wait(now)

    def late(self, node: str, asked: float, now: float, *, fetch: bool) -> None:
        """It has not given a block in time for which it was asked then."""
        late = self._late.setdefault((node, fetch), _backoff())
        if late.failures >= MOST_LATE and asked < late.until - late.pause:
            return  # it was asked before it was known
        late.fail(now)

    def answered(self, node: str, *, fetch: bool) -> None:
        """It has said something, with a block or without."""
        self._late.pop((node, fetch), None)


def _backoff() -> Backoff:
    """Returns one whose pause is the first where a peer is left out for the first time."""
    return Backoff(FIRST_PAUSE * 2.0 ** (1 - MOST_LATE), LONGEST_PAUSE)
