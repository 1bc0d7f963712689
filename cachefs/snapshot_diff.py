"""Compares two snapshots of a dataset."""

from collections.abc import Iterator

from cachefs.messages import SnapshotDiff
from cachefs.snapshot import ROOT, Entry, Snapshot, content_version


def compare_snapshots(old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """Count the files that were added, changed (another size or version at the same path), removed and kept."""
    if old.id == new.id:
        return SnapshotDiff(added=0, changed=0, removed=0, unchanged=new.files)
    changed = unchanged = 0
    for before, after in _common_files(old, new):
        if (before.size, content_version(before.version)) == (after.size, content_version(after.version)):
            unchanged += 1
        else:
            changed += 1
    common = changed + unchanged
    return SnapshotDiff(added=new.files - common, changed=changed, removed=old.files - common, unchanged=unchanged)


def _common_files(old: Snapshot, new: Snapshot) -> Iterator[tuple[Entry, Entry]]:
    """Yield the files at the same path in both snapshots. Enters only directories that both have."""
    pending = [(old.entry(ROOT), new.entry(ROOT))]
    while pending:
        before, after = pending.pop()
        for left, right in _same_names(old.children(before), new.children(after)):
            if left.is_dir and right.is_dir:
                pending.append((left, right))
            elif not left.is_dir and not right.is_dir:
                yield left, right


def _same_names(old: Iterator[Entry], new: Iterator[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Yield the pairs of entries with the same name, from two sequences sorted by name."""
    left, right = next(old, None), next(new, None)
    while left is not None and right is not None:
        if left.name == right.name:
            yield left, right
            left, right = next(old, None), next(new, None)
        elif left.name < right.name:
            left = next(old, None)
        else:
            right = next(new, None)
