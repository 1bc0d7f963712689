"""Which of two changes of a dataset is the later one, where nodes of a cluster make changes at the same time.

No clock of a machine is asked: a change counts as later than all that its node had seen of any dataset.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

MOST_CLOCK: Final = 1 << 53
_NONCE_BITS: Final = 32
# Names of which it is remembered that datasets were removed.
MOST_REMOVED: Final = 4096
# Of one name: adds that became one dataset, and adds of datasets that are removed, that are remembered.
MOST_ADDS: Final = 32
MOST_REMOVALS: Final = 64


class Stamp(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Every change has another one; the larger one is the later change."""

    # One more than the largest that the node had seen.
    clock: int = 0
    # Id of the node that made the change; empty: it was not made in a cluster.
    node: str = ""
    # Random: a node that has lost its state begins to count anew.
    nonce: int = 0


NO_STAMP: Final = Stamp()


class StampClock:
    """Makes the stamps of this node. Used from the event loop only."""

    def __init__(self, node: str) -> None:
        """node: its id."""
        self._node = node
        self._latest = 0

    def see(self, stamps: Iterable[Stamp]) -> None:
        """There are these; those that are made from now on are later."""
        self._latest = min(max(self._latest, max((stamp.clock for stamp in stamps), default=0)), MOST_CLOCK - 1)

    def tick(self) -> Stamp:
        self._latest += 1
        return Stamp(self._latest, self._node, secrets.randbits(_NONCE_BITS))


def with_removed(removed: Mapping[str, list[Stamp]], name: str, added: Iterable[Stamp]) -> dict[str, list[Stamp]]:
    """*removed*, and that datasets of that name which were added then are removed too. The latest are kept."""
    latest = sorted({*removed.get(name, ()), *added})[-MOST_REMOVALS:]
    found = {**removed, name: latest}
    if len(found) > MOST_REMOVED:
        del found[min(found, key=lambda one: found[one][-1])]
    return found
