"""Which snapshot a dataset's name means, as the nodes say."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from cachefs.observe_messages import SnapshotReport

LATEST: Final = "latest"


class DatasetNames:
    """Counts nodes, so what is asked costs the same with any number of them."""

    def __init__(self) -> None:
        # By name of the dataset, for how many nodes each snapshot is the current one.
        self._current: dict[str, Counter[str]] = {}
        self._of_node: dict[str, dict[str, str]] = {}

    def follow(self, node: str, snapshots: Iterable[SnapshotReport]) -> None:
        """The node has these, and no others."""
        current = {name: one.id for one in snapshots for name in one.datasets}
        before = self._of_node.get(node, {})
        if current == before:
            return
        self._count(before, -1)
        self._count(current, 1)
        self._of_node[node] = current

    def forget(self, node: str) -> None:
        """There is no such node any more."""
        self._count(self._of_node.pop(node, {}), -1)

    def _count(self, current: Mapping[str, str], change: int) -> None:
        for name, snapshot in current.items():
            counted = self._current.setdefault(name, Counter())
            counted[snapshot] += change
            if not counted[snapshot]:
                del counted[snapshot]
            if not counted:
                del self._current[name]

    def snapshot(self, spec: str) -> str | None:
        """Of NAME, NAME@latest or NAME@SNAPSHOT (its first digits). The one that most nodes have as the current one,
        while they differ; None where no node knows it."""
        name, _, wanted = spec.partition("@")
        counted = self._current.get(name, Counter())
        found = [one for one in counted if wanted in ("", LATEST) or one.startswith(wanted)]
        return max(found, key=lambda one: (counted[one], one), default=None)

    def names(self) -> list[str]:
        """Of all datasets, sorted."""
        return sorted(self._current)

    def current(self) -> Mapping[str, str]:
        """By name, what `snapshot` says of each."""
        return {name: found for name in self._current if (found := self.snapshot(name)) is not None}


def dataset_of(spec: str) -> str:
    """The name in NAME@SNAPSHOT."""
    return spec.partition("@")[0]
