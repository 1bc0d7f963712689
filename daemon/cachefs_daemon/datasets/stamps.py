"""Orders concurrent changes of a dataset by the nodes of a cluster.

The order is independent of clocks: a change counts as later than all changes that its node had seen of any dataset.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec

MAX_CLOCK: Final = 1 << 53
_NONCE_BITS: Final = 32
# Names of removed datasets that are kept.
MAX_REMOVED: Final = 4096
# Runs of nodes, and datasets that only this node lacks, that are kept for all other names.
MAX_RUNS: Final = 4096
# Limits for one name: stamps of adds that became one dataset, and of removed adds.
MAX_ADDS: Final = 32
MAX_REMOVALS: Final = 64


class ChangeStamp(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Identifies a change. Every change has another stamp; the larger one is the later change."""

    # One more than the largest clock that the node had seen.
    clock: int = 0
    # Id of the node that made the change; "" outside of a cluster. Among removed adds, "" stands for all nodes: see
    # `compact`.
    node: str = ""
    # Random for each run of the node's daemon: a node that has lost its state begins to count anew.
    nonce: int = 0


NO_STAMP: Final = ChangeStamp()


class StampClock:
    """Makes the stamps of this node. Used from the event loop only."""

    def __init__(self, node: str) -> None:
        """node: id of this node."""
        self._node = node
        self._nonce = secrets.randbits(_NONCE_BITS)
        self._latest = 0

    def see(self, stamps: Iterable[ChangeStamp]) -> None:
        """Make all stamps from now on later than these."""
        self._latest = min(max(self._latest, max((stamp.clock for stamp in stamps), default=0)), MAX_CLOCK - 1)

    def tick(self) -> ChangeStamp:
        self._latest += 1
        return ChangeStamp(self._latest, self._node, self._nonce)


def is_floor(stamp: ChangeStamp) -> bool:
    """Return whether the stamp stands for all adds up to its clock, whichever node made them."""
    return not stamp.node


def is_removed_by(gone: Iterable[ChangeStamp], stamp: ChangeStamp) -> bool:
    """Return whether the dataset added at *stamp* is among the removed *gone* (see `compact`)."""
    return any(
        stamp.clock <= one.clock and (is_floor(one) or (one.node, one.nonce) == (stamp.node, stamp.nonce))
        for one in gone
    )


def compact(stamps: Iterable[ChangeStamp]) -> list[ChangeStamp]:
    """Return removed adds of one name, compacted, in order.

    Where there are more than MAX_REMOVALS, the latest one of each run of a node stands for the earlier ones, since a
    node adds a name again only after what it had under that name was removed. Where there are more of these too, a
    stamp without a node stands for all adds up to its clock.
    """
    known = set(stamps)
    if len(known) <= MAX_REMOVALS:
        return sorted(known)
    floor = max((one.clock for one in known if is_floor(one)), default=0)
    above = [one for one in _latest_of_runs(known) if one.clock > floor]
    if len(above) >= MAX_REMOVALS:
        floor = above[-MAX_REMOVALS].clock
    return [*([ChangeStamp(floor)] if floor else []), *(one for one in above if one.clock > floor)]


def _latest_of_runs(stamps: Iterable[ChangeStamp]) -> list[ChangeStamp]:
    """Return the latest stamp of each run of a node, in order."""
    latest: dict[tuple[str, int], ChangeStamp] = {}
    for stamp in stamps:
        run = stamp.node, stamp.nonce
        latest[run] = max(stamp, latest.get(run, stamp))
    return sorted(latest.values())


def with_removed(
    removed: Mapping[str, list[ChangeStamp]], name: str, added: Iterable[ChangeStamp]
) -> dict[str, list[ChangeStamp]]:
    """Return *removed* with the datasets of that name that were added then. The name comes last."""
    others = {one: gone for one, gone in removed.items() if one != name}
    return {**others, name: compact([*removed.get(name, ()), *added])}


def joined_adds(adds: Iterable[ChangeStamp]) -> list[ChangeStamp]:
    """Return adds that have become one dataset, in order: the earliest MAX_ADDS; the last of these stands for all adds
    up to its clock where there are more."""
    known = set(adds)
    made = sorted(one for one in known if not is_floor(one))
    if len(known) <= MAX_ADDS:
        return sorted(known)
    return sorted({*made[: MAX_ADDS - 1], ChangeStamp(max(one.clock for one in known))})


class SharedChanges(Protocol):
    """Connects the changes of this node's datasets with those of other nodes. Used from the event loop only."""

    def stamp(self) -> ChangeStamp:
        """Return the stamp of a change that is made on this node; NO_STAMP outside of a cluster."""

    def note_change(self, name: str) -> None:
        """Note that the dataset has changed, whichever node changed it."""

    def additions_elsewhere(self) -> Iterable[tuple[str, ChangeStamp]]:
        """Return name and stamp of the datasets that other nodes have and this one does not."""

    def stamps_elsewhere(self, name: str) -> Iterable[ChangeStamp]:
        """Return the stamps of the same dataset on other nodes: several may have added it at once."""


class UnsharedChanges:
    """The changes of a node that is alone, which concern no other."""

    def stamp(self) -> ChangeStamp:
        return NO_STAMP

    def note_change(self, name: str) -> None: ...

    def additions_elsewhere(self) -> Iterable[tuple[str, ChangeStamp]]:
        return ()

    def stamps_elsewhere(self, name: str) -> Iterable[ChangeStamp]:
        return ()


UNSHARED: Final[SharedChanges] = UnsharedChanges()

# Returns name and stamp of the datasets that other nodes have and this one does not.
AdditionsElsewhere = Callable[[], Iterable[tuple[str, ChangeStamp]]]


class Removals(msgspec.Struct, frozen=True):
    """The removals in a cluster, which keep a node that was away from bringing a dataset back."""

    # By name, the removed adds (see `compact`): of the names that were removed last.
    names: dict[str, list[ChangeStamp]] = {}
    # The removed adds of all other names, by run of a node (see `compact`). A node receives all adds of the others, so
    # a dataset that it does not have and that this covers was removed, unless it is in `spared`.
    forgotten: list[ChangeStamp] = []
    # Datasets that this node knew, and could not have, or dropped alone.
    spared: list[ChangeStamp] = []

    def is_removed(self, name: str, added: Iterable[ChangeStamp]) -> bool:
        """Return whether the dataset of that name that was added then was removed."""
        gone = self.names.get(name, ())
        return any(is_removed_by(gone, stamp) for stamp in added if not is_floor(stamp))

    def is_forgotten(self, stamp: ChangeStamp) -> bool:
        """Return whether a dataset that was added then and that this node does not have was removed."""
        return stamp not in self.spared and is_removed_by(self.forgotten, stamp)

    def with_removal(self, name: str, added: Iterable[ChangeStamp], elsewhere: AdditionsElsewhere) -> "Removals":
        """Return these removals with the datasets of that name that were added then. elsewhere: called where a name has
        to be forgotten."""
        removed = list(added)
        names = with_removed(self.names, name, removed)
        spared = [one for one in self.spared if one not in removed]
        if len(names) <= MAX_REMOVED:
            return Removals(names, self.forgotten, spared)
        oldest = next(iter(names))
        unknown = {
            one
            for known, one in elsewhere()
            if not (is_floor(one) or self.is_forgotten(one) or is_removed_by(names.get(known, ()), one))
        }
        # A floor belongs to one name only.
        gone = [one for one in names.pop(oldest) if not is_floor(one)]
        spared = sorted(unknown.union(spared).difference(removed, gone))
        forgotten = _latest_of_runs([*self.forgotten, *gone])
        return Removals(names, forgotten[-MAX_RUNS:], spared[-MAX_RUNS:])

    def with_spared(self, added: Iterable[ChangeStamp]) -> "Removals":
        """Return these removals, with the datasets that this node alone has dropped."""
        spared = {*self.spared, *(one for one in added if not is_floor(one))}
        return Removals(self.names, self.forgotten, sorted(spared)[-MAX_RUNS:])
