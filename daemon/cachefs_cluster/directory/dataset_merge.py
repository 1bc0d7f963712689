"""Merges what all nodes know about a dataset name into one meaning: the same on all nodes, and without a clock.

Datasets of one name on several nodes are one dataset if they were added as one, or have the same URL and options: then
the latest listing, options and limits hold. A dataset that was removed anywhere is removed, with all datasets merged
into it. Two different ones (two URLs, added while the nodes did not see each other) stay where they are, and a node
that has neither takes the one that was added first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from cachefs_cluster.sharing.sections import SharedDataset
from cachefs_daemon.datasets.stamps import ChangeStamp, compact, is_floor, joined_adds
from cachefs_daemon.datasets.stamps import is_removed_by as is_covered


def _is_never_forgotten(_: ChangeStamp) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Resolution:
    """The merged meaning of a name."""

    # Target state of this node; without `added`, no dataset of this name should exist.
    value: SharedDataset
    # A different dataset of this name, on other nodes.
    rival: SharedDataset | None


def resolve(
    own: SharedDataset,
    others: Iterable[SharedDataset],
    is_forgotten: Callable[[ChangeStamp], bool] = _is_never_forgotten,
) -> Resolution:
    """Merge the states of one name. own: of this node; others: published by other nodes. is_forgotten: returns whether
    a dataset added at a stamp was removed, if this node does not have it (see `Removals`)."""
    others = list(others)
    known = [own, *others]
    # A removal that this node has already forgotten must not take room in the list again: two nodes with full lists
    # would evict each other's removals before a third node has received them.
    removals = (stamp for one in others for stamp in one.gone if _is_new_removal(own, stamp, is_forgotten))
    gone = compact([*own.gone, *removals])
    # Before merging: a dataset that was added again differs from the removed one, whatever its URL.
    left = [one for one in known if one.added]
    unknown = {stamp for one in left for stamp in _addition_stamps(one) if not is_added(own.added, stamp)}
    gone = compact([*gone, *(stamp for stamp in unknown if is_forgotten(stamp))])
    while dead := [one for one in left if any(is_covered(gone, stamp) for stamp in _addition_stamps(one))]:
        gone = compact([*gone, *(stamp for one in dead for stamp in one.added)])
        left = [one for one in left if one not in dead]
    left = sorted(_merge_equal(left), key=lambda one: one.added[0])
    mine = [one for one in left if not _addition_stamps(one).isdisjoint(_addition_stamps(own))]
    chosen, *others_left = mine + [one for one in left if one not in mine] or [SharedDataset()]
    value = msgspec.structs.replace(chosen, gone=gone)
    return Resolution(value, others_left[0] if others_left else None)


def _is_new_removal(own: SharedDataset, removed: ChangeStamp, is_forgotten: Callable[[ChangeStamp], bool]) -> bool:
    """Return whether another node's removal is unknown here, or applies to this node's dataset."""
    return not is_forgotten(removed) or any(is_covered([removed], stamp) for stamp in own.added)


def includes(published: SharedDataset, value: SharedDataset) -> bool:
    """Return whether *published* includes all of *value*."""
    return resolve(published, [value]) == Resolution(published, None)


def is_same(one: SharedDataset, other: SharedDataset) -> bool:
    """Return whether two states are of one dataset."""
    return not _addition_stamps(one).isdisjoint(_addition_stamps(other)) or (one.url, one.options) == (
        other.url,
        other.options,
    )


def is_added(added: Iterable[ChangeStamp], stamp: ChangeStamp) -> bool:
    """Return whether an addition at *stamp* is part of a dataset with the additions *added*."""
    return any(one == stamp or (is_floor(one) and stamp.clock <= one.clock) for one in added)


def _addition_stamps(one: SharedDataset) -> set[ChangeStamp]:
    """Return the stamps of additions, without the floor that stands for several nodes."""
    return {stamp for stamp in one.added if not is_floor(stamp)}


def _merge_equal(known: list[SharedDataset]) -> list[SharedDataset]:
    """Merge equal datasets."""
    merged: list[SharedDataset] = []
    for one in known:
        same = [other for other in merged if is_same(one, other)]
        merged = [other for other in merged if other not in same]
        for other in same:
            one = _merge_two(one, other)
        merged.append(one)
    return merged


def _merge_two(one: SharedDataset, other: SharedDataset) -> SharedDataset:
    latest = max(one, other, key=lambda each: (each.listed, each.snapshot))
    limits = max(one, other, key=lambda each: (each.limited, each.share, each.ttl, each.most))
    reached = max(one, other, key=lambda each: (each.reached, msgspec.json.encode(each.options), each.named))
    return msgspec.structs.replace(
        latest,
        gone=[],
        added=joined_adds([*one.added, *other.added]),
        options=reached.options,
        named=reached.named,
        reached=reached.reached,
        share=limits.share,
        ttl=limits.ttl,
        most=limits.most,
        limited=limits.limited,
    )
