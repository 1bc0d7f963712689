"""The placement of a cluster's blocks, as the daemon's parts use it."""

from collections.abc import Collection, Mapping

from cachefs.planning.blocks.space import BlockSpace
from cachefs_cluster.placement.cooperation import Cooperation
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_daemon.ports import LOCAL_PLACEMENT, Placement


class ClusterPlacement:
    """Implements `cachefs_daemon.ports.Placement`. Jobs need it before the cooperation exists, which follows the jobs:
    until `connect`, and where nothing is fetched ahead, it answers as a node alone does. Used on the event loop."""

    def __init__(self) -> None:
        self.cooperation: Cooperation | None = None
        self._placement: Placement = LOCAL_PLACEMENT

    def connect(self, cooperation: Cooperation) -> None:
        """Follow the jobs of all nodes from now on."""
        self.cooperation = self._placement = cooperation

    @property
    def first_rate(self) -> float:
        return self._placement.first_rate

    async def place_snapshot(self, space: BlockSpace) -> None:
        await self._placement.place_snapshot(space)

    def used_snapshots(self) -> Collection[str]:
        return self._placement.used_snapshots()

    def margins(self) -> Mapping[str, float]:
        return self._placement.margins()

    def shared_snapshot(self, snapshot: str) -> SharedSnapshot | None:
        """Return the shared snapshot; None if no job of several nodes reads it."""
        return self.cooperation.shared_snapshot(snapshot) if self.cooperation is not None else None

    def hot_datasets(self) -> list[str]:
        """Return the names of the datasets that have second copies now."""
        return self.cooperation.hot_datasets() if self.cooperation is not None else []

    async def close(self) -> None:
        if self.cooperation is not None:
            await self.cooperation.close()
