"""The placement of a cluster's blocks, as the daemon's parts use it."""

from collections.abc import Collection, Mapping, Sequence

from cachefs.planning.blocks.space import BlockSpace
from cachefs_cluster.placement.cooperation import FIRST_RATE, Cooperation
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_daemon.ports import LOCAL_PLACEMENT


class ClusterPlacement:
    """Implements `cachefs_daemon.ports.Placement`. Jobs need it before the cooperation exists, which follows the jobs:
    until `connect`, and where nothing is fetched ahead, it answers as a node alone does. Used on the event loop."""

    def __init__(self) -> None:
        self.cooperation: Cooperation | None = None

    def connect(self, cooperation: Cooperation) -> None:
        """Follow the jobs of all nodes from now on."""
        self.cooperation = cooperation

    @property
    def first_rate(self) -> float:
        return FIRST_RATE if self.cooperation is not None else LOCAL_PLACEMENT.first_rate

    async def place_snapshot(self, space: BlockSpace) -> None:
        if self.cooperation is not None:
            await self.cooperation.place_snapshot(space)

    def used_snapshots(self) -> Collection[str]:
        return self.cooperation.snapshots.keys() if self.cooperation is not None else ()

    def margins(self) -> Mapping[str, float]:
        return self.cooperation.margins() if self.cooperation is not None else {}

    def shared_snapshot(self, snapshot: str) -> SharedSnapshot | None:
        """Return the shared snapshot; None if no job of several nodes reads it."""
        return self.cooperation.shared_snapshot(snapshot) if self.cooperation is not None else None

    def note_served_blocks(self, node: str, keys: Sequence[bytes]) -> None:
        """Record that another node got blocks from this one."""
        if self.cooperation is not None:
            self.cooperation.note_served_blocks(node, keys)

    async def close(self) -> None:
        if self.cooperation is not None:
            await self.cooperation.close()
