"""Which snapshot a dataset's name means, as the nodes say."""

from collections import Counter
from collections.abc import Iterable, Mapping

from cachefs.observe_messages import SnapshotReport

LATEST = "latest"


class DatasetNames:
    """By name of the dataset and of the node, the snapshot that is current there."""

    def __init__(self) -> None:
        self._current: dict[str, dict[str, str]] = {}
        self._of_node: dict[str, dict[str, str]] = {}

    def follow(self, node: str, snapshots: Iterable[SnapshotReport]) -> None:
        """The node has these, and no others."""
        current = {name: one.id for one in snapshots for name in one.datasets}
        before = self._of_node.get(node, {})
        if current == before:
            return
        for name in before.keys() - current.keys():
            self._drop(name, node)
        for name, snapshot in current.items():
            self._current.setdefault(name, {})[node] = snapshot
        self._of_node[node] = current

    def forget(self, node: str) -> None:
        """There is no such node any more."""
        for name in self._of_node.pop(node, {}):
            self._drop(name, node)

    def _drop(self, name: str, node: str) -> None:
        nodes = self._current[name]
        nodes.pop(node, None)
        if not nodes:
            del self._current[name]

    def snapshot(self, spec: str) -> str | None:
        """Of NAME, NAME@latest or NAME@SNAPSHOT (its first digits). The one that most nodes have as the current one,
        while they differ; None where no node knows it."""
        name, _, wanted = spec.partition("@")
        counted = Counter(self._current.get(name, {}).values())
        if wanted not in ("", LATEST):
            counted = Counter({one: count for one, count in counted.items() if one.startswith(wanted)})
        return max(counted, key=lambda one: (counted[one], one)) if counted else None

    def names(self) -> list[str]:
        """Of all datasets, sorted."""
        return sorted(self._current)

    def current(self) -> Mapping[str, str]:
        """By name, what `snapshot` says of each."""
        return {name: found for name in self._current if (found := self.snapshot(name)) is not None}


def dataset_of(spec: str) -> str:
    """The name in NAME@SNAPSHOT."""
    return spec.partition("@")[0]
