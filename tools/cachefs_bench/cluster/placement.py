"""Finds where blocks are, and where they belong according to a node's members. Each file of a lab is one block."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import xxhash

from cachefs.block import block_key
from cachefs.messages import DatasetName, Empty, Selection
from cachefs.planning.cluster.homes import BlockHomes
from cachefs.planning.cluster.rendezvous import RingMember, key_hashes
from cachefs.rpc import CACHED, CLUSTER, DATASET_SHOW
from cachefs.snapshot import Snapshot
from cachefs_bench.directory_node import DATASET
from cachefs_bench.lab.node import LabNode


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """The blocks of the dataset at one moment."""

    blocks: int
    belong: dict[str, int]  # by node: number of blocks whose home it is
    at_home: dict[str, int]  # by node: blocks at home there
    held: dict[str, int]  # by node: blocks held
    nowhere: int  # blocks that no node holds

    def max_deviation(self) -> float:
        """Return the deviation of the worst node from an equal part, counting blocks at home: 0 is ideal."""
        ideal = self.blocks / len(self.belong) if self.belong else 0.0
        return max((abs(count - ideal) / ideal for count in self.at_home.values()), default=1.0)

    def count_away_from_home(self) -> int:
        """Return the number of blocks that are not at home."""
        return self.blocks - sum(self.at_home.values())


def find_blocks(nodes: Sequence[LabNode]) -> BlockPlacement:
    """Return where the blocks are on these nodes; the first node's view decides where they belong."""
    homes = homes_by_path(nodes[0])
    found = {node.name: held_bytes(node).keys() for node in nodes}
    everywhere = set().union(*found.values())
    belong = Counter(homes.values())
    at_home = Counter(name for path, name in homes.items() if path in found.get(name, ()))
    return BlockPlacement(
        len(homes), dict(belong), {name: at_home[name] for name in belong},
        {name: len(paths) for name, paths in found.items()}, len(homes.keys() - everywhere),
    )  # fmt: skip


def homes_by_path(node: LabNode, dataset: str = DATASET) -> dict[bytes, str]:
    """Return by file path the name of the home node of its block, in this node's view of the cluster."""
    members = [one for one in node.client.call(CLUSTER, Empty(), timeout=10).members if one.placing]
    view = node.client.call(DATASET_SHOW, DatasetName(name=dataset)).dataset
    snapshot = Snapshot(Path(view.path))
    try:
        contents = list(snapshot.contents())
        paths = [snapshot.path(number) for number, _, _ in contents]
    finally:
        snapshot.close()
    keys = numpy.frombuffer(b"".join(block_key(content, 0) for _, _, content in contents), numpy.uint8)
    homes = BlockHomes(key_hashes(keys.reshape(-1, len(keys) // len(contents))))
    homes.set_members(
        [RingMember(one.id, xxhash.xxh3_64_intdigest(one.id.encode()), one.weight, one.zone) for one in members]
    )
    names = {one.id: one.name for one in members}
    return {
        path: names[homes.members[number].id]
        for path, number in zip(paths, homes.first.tolist(), strict=True)
        if number < len(homes.members)
    }


def held_bytes(node: LabNode) -> dict[bytes, int]:
    """Return by file path the bytes in the tiers of a node."""
    found: dict[bytes, int] = {}
    for page in node.client.stream_responses(CACHED, Selection(dataset=DATASET)):
        found.update((file.path, sum(file.cached)) for file in page.files if any(file.cached))
    return found
