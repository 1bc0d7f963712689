"""Which of two changes of a dataset is the later one, where nodes of a cluster make changes at the same time.

No clock of a machine is asked: a change counts as later than all that its node had seen of any dataset.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

MOST_CLOCK: Final = 1 << 53
_NONCE_BITS: Final = 32
# Names of which it is remembered that datasets were removed.
MOST_REMOVED: Final = 4096
# Runs of nodes, and datasets that this node alone does not have, that are remembered for all other names.
MOST_RUNS: Final = 4096
# Of one name: stamps of adds that became one dataset, and of removed adds.
MOST_ADDS: Final = 32
MOST_REMOVALS: Final = 64


class Stamp(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Every change has another one; the larger one is the later change."""

    # One more than the largest that the node had seen.
    clock: int = 0
    # Id of the node that made the change; empty: it was not made in a cluster. Among removed adds an empty one stands
    # for all nodes: see `compact`.
    node: str = ""
    # Random, another one for each run of the node's daemon: a node that has lost its state begins to count anew.
    nonce: int = 0


NO_STAMP: Final = Stamp()


class StampClock:
    """Makes the stamps of this node. Used from the event loop only."""

    def __init__(self, node: str) -> None:
        """node: its id."""
        self._node = node
        self._nonce = secrets.randbits(_NONCE_BITS)
        self._latest = 0

    def see(self, stamps: Iterable[Stamp]) -> None:
        """There are these; those that are made from now on are later."""
        self._latest = min(max(self._latest, max((stamp.clock for stamp in stamps), default=0)), MOST_CLOCK - 1)

    def tick(self) -> Stamp:
        self._latest += 1
        return Stamp(self._latest, self._node, self._nonce)


def is_floor(stamp: Stamp) -> bool:
    """Does the stamp stand for all adds up to its clock, whichever node made them?"""
    return not stamp.node


def covers(gone: Iterable[Stamp], stamp: Stamp) -> bool:
    """Was what was added at *stamp* removed, as *gone* has it (see `compact`)?"""
    return any(
        stamp.clock <= one.clock and (is_floor(one) or (one.node, one.nonce) == (stamp.node, stamp.nonce))
        for one in gone
    )


def compact(stamps: Iterable[Stamp]) -> list[Stamp]:
    """Removed adds of one name, in order.

    Where there are more than MOST_REMOVALS, the latest one of each run of a node stands for the earlier ones, since a
    node adds a name again only after what it had under that name was removed. Where there are more of these too, a
    stamp without a node stands for all adds up to its clock.
    """
    known = set(stamps)
    if len(known) <= MOST_REMOVALS:
        return sorted(known)
    floor = max((one.clock for one in known if is_floor(one)), default=0)
    above = [one for one in _latest_of_runs(known) if one.clock > floor]
    if len(above) >= MOST_REMOVALS:
        floor = above[-MOST_REMOVALS].clock
    return [*([Stamp(floor)] if floor else []), *(one for one in above if one.clock > floor)]


def _latest_of_runs(stamps: Iterable[Stamp]) -> list[Stamp]:
    """The latest of each run of a node, in order."""
    latest: dict[tuple[str, int], Stamp] = {}
    for stamp in stamps:
        run = stamp.node, stamp.nonce
        latest[run] = max(stamp, latest.get(run, stamp))
    return sorted(latest.values())


def with_removed(removed: Mapping[str, list[Stamp]], name: str, added: Iterable[Stamp]) -> dict[str, list[Stamp]]:
    """*removed*, and that datasets of that name which were added then are removed too. The name comes last."""
    others = {one: gone for one, gone in removed.items() if one != name}
    return {**others, name: compact([*removed.get(name, ()), *added])}


def joined_adds(adds: Iterable[Stamp]) -> list[Stamp]:
    """Adds that have become one dataset, in order: the earliest MOST_ADDS; the last of these stands for all adds up to
    its clock where there are more."""
    known = set(adds)
    made = sorted(one for one in known if not is_floor(one))
    if len(known) <= MOST_ADDS:
        return sorted(known)
    return sorted({*made[: MOST_ADDS - 1], Stamp(max(one.clock for one in known))})


# Gives the names of datasets, and when they were added, that other nodes have and this one does not.
Elsewhere = Callable[[], Iterable[tuple[str, Stamp]]]


class Removals(msgspec.Struct, frozen=True):
    """What was removed in the cluster: a node that was away has it still, and must not bring it back."""

    # By name, the removed adds (see `compact`): of the names that were removed last.
    names: dict[str, list[Stamp]] = {}
    # The removed adds of all other names, by run of a node (see `compact`). A node hears of all that another one has
    # added, so what it does not have itself, and this covers, was removed,
    forgotten: list[Stamp] = []
    # unless it is one of these: this node knew of the dataset, and could not have it, or let go of it alone.
    spared: list[Stamp] = []

    def is_removed(self, name: str, added: Iterable[Stamp]) -> bool:
        """Was the dataset of that name removed which was added then?"""
        gone = self.names.get(name, ())
        return any(covers(gone, stamp) for stamp in added if not is_floor(stamp))

    def is_forgotten(self, stamp: Stamp) -> bool:
        """Was what was added then removed, where this node does not have it?"""
        return stamp not in self.spared and covers(self.forgotten, stamp)

    def adding(self, name: str, added: Iterable[Stamp], elsewhere: Elsewhere) -> "Removals":
        """These, and that datasets of that name which were added then are removed too. elsewhere: is asked where a name
        has to be forgotten."""
        removed = list(added)
        names = with_removed(self.names, name, removed)
        spared = [one for one in self.spared if one not in removed]
        if len(names) <= MOST_REMOVED:
            return Removals(names, self.forgotten, spared)
        oldest = next(iter(names))
        unknown = {
            one
            for known, one in elsewhere()
            if not (is_floor(one) or self.is_forgotten(one) or covers(names.get(known, ()), one))
        }
        # A floor is of one name alone.
        gone = [one for one in names.pop(oldest) if not is_floor(one)]
        spared = sorted(unknown.union(spared).difference(removed, gone))
        forgotten = _latest_of_runs([*self.forgotten, *gone])
        return Removals(names, forgotten[-MOST_RUNS:], spared[-MOST_RUNS:])

    def sparing(self, added: Iterable[Stamp]) -> "Removals":
        """These, and that this node alone has let go of what was added then."""
        spared = {*self.spared, *(one for one in added if not is_floor(one))}
        return Removals(self.names, self.forgotten, sorted(spared)[-MOST_RUNS:])
