"""Peers that show no sign of life while readers wait for them: stopped, cut off, or hanging as a whole.

One that lives gives a sign every 0.1 s while it brings a block (see `cachefs_daemon.peers.signs`), and what it has it
sends at once. So half a second without any sign says much more than half a second without the block, and readers go on
to the next source at once, however many there are. Until the peer gives a sign again, readers pass it over, but for one
now and then. Meanwhile it is probed, and counts as dead where that comes to nothing. What nobody waits for is asked of
it until then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Seconds without a sign after which a reader asks elsewhere too: of a peer that is asked whether it has a block, and of
# one that is to bring it, where the next one to be asked may be the origin. On a machine that is overloaded (six busy
# processes for each processor) a sign is late by 0.2 s.
SILENT_HERE: Final = 0.3
SILENT_FETCH: Final = 0.5
# Seconds until a reader tries it again: at first, and at most. They are doubled each time.
FIRST_PAUSE: Final = 4.0
LONGEST_PAUSE: Final = 60.0


@dataclass(slots=True)
class _Silence:
    """Of one peer."""

    noticed: float
    pause: float
    until: float  # when a reader may try it again


class SilentPeers:
    """By id of the node, and by what it is asked for: it may give what it has, and not bring what it does not have.
    Times are of one clock."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, bool], _Silence] = {}

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget those of which *is_known* says no by their id: they have left the cluster."""
        self._silent = {key: one for key, one in self._silent.items() if is_known(key[0])}

    def noticed_at(self) -> list[tuple[str, bool, float]]:
        """By node and by what it was asked for (fetch): when its silence was noticed last."""
        return [(node, fetch, one.noticed) for (node, fetch), one in self._silent.items()]

    def noticed(self, node: str, asked: float, now: float, *, fetch: bool) -> None:
        """It has given no sign since it was asked then. Who does not even give what it has brings nothing either."""
        if not fetch:
            self.noticed(node, asked, now, fetch=True)
        silence = self._silent.get((node, fetch))
        if silence is None:
            self._silent[node, fetch] = _Silence(now, FIRST_PAUSE, now + FIRST_PAUSE)
        elif asked >= silence.noticed:  # else it was asked before that was known
            silence.noticed, silence.pause = now, min(LONGEST_PAUSE, 2 * silence.pause)
            silence.until = now + silence.pause

    def may_ask(self, node: str, now: float, last_sign: float, *, fetch: bool) -> bool:
        """May a reader wait for it? Where True is for a try, nobody else tries for a while."""
        silence = self._silent.get((node, fetch))
        if silence is None:
            return True
        if last_sign > silence.noticed:
            del self._silent[node, fetch]
            return True
        if now < silence.until:
            return False
        silence.until = now + silence.pause
        return True
