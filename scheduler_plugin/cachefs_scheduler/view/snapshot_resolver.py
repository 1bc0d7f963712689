"""Resolves dataset names to snapshots, by what the nodes report."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from cachefs.observe_messages import SnapshotReport

LATEST: Final = "latest"


class SnapshotResolver:
    """Counts nodes per dataset and snapshot, so that look-ups do not depend on the number of nodes."""

    def __init__(self) -> None:
        # By dataset: for how many nodes each snapshot is the current one.
        self._current: dict[str, Counter[str]] = {}
        self._of_node: dict[str, dict[str, str]] = {}

    def replace_node(self, node: str, snapshots: Iterable[SnapshotReport]) -> None:
        """Replace the snapshots of a node."""
        current = {name: one.id for one in snapshots for name in one.datasets}
        before = self._of_node.get(node, {})
        if current == before:
            return
        self._change_counts(before, -1)
        self._change_counts(current, 1)
        self._of_node[node] = current

    def remove_node(self, node: str) -> None:
        """Remove a node."""
        self._change_counts(self._of_node.pop(node, {}), -1)

    def _change_counts(self, current: Mapping[str, str], change: int) -> None:
        for name, snapshot in current.items():
            counted = self._current.setdefault(name, Counter())
            counted[snapshot] += change
            if not counted[snapshot]:
                del counted[snapshot]
            if not counted:
                del self._current[name]

    def resolve(self, spec: str) -> str | None:
        """Resolve NAME, NAME@latest or NAME@SNAPSHOT (its first digits). While nodes differ, the snapshot that is
        current on most nodes wins; None if no node knows it."""
        name, _, wanted = spec.partition("@")
        counted = self._current.get(name, Counter())
        found = [one for one in counted if wanted in ("", LATEST) or one.startswith(wanted)]
        return max(found, key=lambda one: (counted[one], one), default=None)

    def dataset_names(self) -> list[str]:
        """Return all dataset names, sorted."""
        return sorted(self._current)

    def current_snapshots(self) -> Mapping[str, str]:
        """Return the snapshot of each dataset."""
        return {name: found for name in self._current if (found := self.resolve(name)) is not None}


def dataset_name(spec: str) -> str:
    """Return the name in NAME@SNAPSHOT."""
    return spec.partition("@")[0]
