"""The directory of a cluster's datasets and their readers, as the daemon's parts use it."""

from collections.abc import Iterable, Sequence

from cachefs.messages import RemoteMount
from cachefs_cluster.node_sharing import NodeSharing
from cachefs_daemon.datasets.stamps import ChangeStamp, SharedChanges
from cachefs_daemon.ports import LOCAL_DIRECTORY, RemoteReaders


class ClusterDirectory:
    """Implements `cachefs_daemon.ports.Directory`. The catalog needs it before the parts exist that share the catalog:
    until `connect`, it answers as a node alone does. Used on the event loop."""

    def __init__(self) -> None:
        self._sharing: NodeSharing | None = None
        self._changes: SharedChanges = LOCAL_DIRECTORY
        self._readers: RemoteReaders = LOCAL_DIRECTORY

    def connect(self, sharing: NodeSharing) -> None:
        """Share this node's datasets from now on."""
        self._sharing, self._changes, self._readers = sharing, sharing.datasets, sharing.used

    def is_coming(self, snapshot_id: str) -> bool:
        """Return whether a snapshot is on its way to this node, as far as is known."""
        return self._sharing is not None and self._sharing.is_coming(snapshot_id)

    # --- changes ------------------------------------------------------------------------------------------------------

    def stamp(self) -> ChangeStamp:
        return self._changes.stamp()

    def note_change(self, name: str) -> None:
        self._changes.note_change(name)

    def additions_elsewhere(self) -> Iterable[tuple[str, ChangeStamp]]:
        return self._changes.additions_elsewhere()

    def stamps_elsewhere(self, name: str) -> Iterable[ChangeStamp]:
        return self._changes.stamps_elsewhere(name)

    async def catch_up(self, seconds: float) -> None:
        if self._sharing is not None:
            await self._sharing.shared.catch_up(seconds)

    # --- readers ------------------------------------------------------------------------------------------------------

    def is_used(self, snapshot_id: str) -> bool:
        return self._readers.is_used(snapshot_id)

    def keep_if_read(self, snapshot_id: str) -> bool:
        return self._readers.keep_if_read(snapshot_id)

    def note_reads_changed(self) -> None:
        self._readers.note_reads_changed()

    def outdated_mounts(self, name: str, current: str) -> Sequence[RemoteMount]:
        return self._readers.outdated_mounts(name, current)

    def check_not_mounted_elsewhere(self, name: str) -> None:
        self._readers.check_not_mounted_elsewhere(name)
