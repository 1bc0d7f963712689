"""The consumers of jobs, as the nodes publish them. Large parts are fetched on demand."""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from cachefs.job_messages import SampleMap
from cachefs.planning.sequences.sampler import EpochOrder
from cachefs_cluster.sharing.blobs import SharedBlobs
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.sections import CONSUMERS, PROGRESS, ConsumerFacts, ConsumerProgress
from cachefs_cluster.sharing.state import SharedState

_TREE = SampleMap(kind="tree")


@dataclass(frozen=True, slots=True)
class RemoteConsumer:
    """A consumer on another node (or on this one, see `own_consumers`)."""

    # Id of the node.
    node: str
    # The same name at the same node means the same facts until they change.
    name: str
    facts: ConsumerFacts
    # None: it has not begun, or this node does not follow that node's progress.
    progress: ConsumerProgress | None
    _blobs: SharedBlobs = field(repr=False, compare=False)

    async def fetch_order(self, epoch: int) -> EpochOrder | None:
        """Return the published order of an epoch, or None: sample numbers, shape (samples of the epoch,), uint32.
        Raises PeerFailed."""
        for ref in self.facts.orders:
            if ref.epoch == epoch:
                raw = await self._blobs.fetch_blob(self.node, ref.digest, 4 * ref.samples)
                return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)
        return None

    async def fetch_sample_map(self) -> SampleMap:
        """Return the consumer's sample map. Raises PeerFailed."""
        if not self.facts.map:
            return _TREE
        raw = await self._blobs.fetch_blob(self.node, self.facts.map, self.facts.map_size)
        try:
            return msgspec.msgpack.decode(raw, type=SampleMap)
        except msgspec.MsgspecError as error:
            raise PeerFailed(f"the sample map of {self.name}: {error}") from None


class PublishedConsumers:
    """The consumers that all nodes have published. Used on the event loop.

    Use `SharedState.add_listener` with CONSUMERS and PROGRESS to learn of changes.
    """

    def __init__(self, shared: SharedState, blobs: SharedBlobs) -> None:
        self._shared = shared
        self._blobs = blobs

    def remote_consumers(self) -> list[RemoteConsumer]:
        """Return the consumers of other nodes, sorted by node id and name."""
        positions = self._shared.remote_values(PROGRESS)
        return [
            RemoteConsumer(node, name, facts, positions.get(node, {}).get(name), self._blobs)
            for node, values in sorted(self._shared.remote_values(CONSUMERS).items())
            for name, facts in sorted(values.items())
        ]

    def own_consumers(self) -> list[RemoteConsumer]:
        """Return the consumers of this node, as other nodes see them."""
        me = self._shared.membership.view.me
        found = []
        for name in sorted(self._shared.published_names(CONSUMERS)):
            facts = self._shared.own_value(CONSUMERS, name)
            if facts is not None:
                found.append(RemoteConsumer(me, name, facts, self._shared.own_value(PROGRESS, name), self._blobs))
        return found
