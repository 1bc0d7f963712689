"""The caches of the simulated nodes, equal for all policies of scheduling.

A node keeps what it reads, and evicts least recently read datasets for it, but nothing that a job reads there. If it
has no room, another node keeps the data, of its zone if one there has room.
"""

import numpy as np
import numpy.typing as npt

from cachefs_bench.scheduling.workload import SimulationShape


class SimulatedCaches:
    """Parts of datasets held by nodes."""

    def __init__(self, shape: SimulationShape, sizes: npt.NDArray[np.int64], zones: npt.NDArray[np.int64]) -> None:
        # Part of each dataset on each node: 0 to 1, shape (nodes, datasets).
        self.held = np.zeros((shape.nodes, shape.datasets))
        # Number of jobs that read the dataset on the node, and time of the last read.
        self.readers = np.zeros((shape.nodes, shape.datasets), np.int64)
        self.last_read = np.full((shape.nodes, shape.datasets), -np.inf)
        self.sizes = sizes
        self._capacity = float(shape.capacity)
        self._zones = zones

    def load_datasets(self, seed: int) -> None:
        """Load each dataset into the cluster once, like an administrator who warms caches up: onto as few nodes of one
        zone as have room for it in half of their caches, starting at a random node."""
        chance = np.random.default_rng(seed)
        for dataset, size in enumerate(self.sizes.tolist()):
            lacking, first = 1.0, int(chance.integers(len(self.held)))
            zone = np.flatnonzero(self._zones == self._zones[first])
            others = np.flatnonzero(self._zones != self._zones[first])
            for node in [first, *zone[zone != first].tolist(), *others.tolist()]:
                part = min(lacking, max(0.0, self._capacity / 2 - self.used_bytes(node)) / size)
                self.held[node, dataset] += part
                lacking -= part

    def store_part(self, node: int, dataset: int, part: float) -> tuple[int, float]:
        """Store a part of a dataset that the node has read and did not have. Returns the node that keeps it, and how
        much."""
        part = min(part, 1.0 - float(self.held[node, dataset]))
        if part <= 0:
            return node, 0.0
        keeper = node
        if self._available_bytes(node) < part * self.sizes[dataset] * 0.5:
            keeper = self._other_node(node, dataset)
        part = min(part, 1.0 - float(self.held[keeper, dataset]), self._available_bytes(keeper) / self.sizes[dataset])
        if part <= 0:
            return keeper, 0.0
        self._evict(keeper, part * self.sizes[dataset])
        self.held[keeper, dataset] += part
        if keeper != node:
            self.last_read[keeper, dataset] = max(self.last_read[keeper, dataset], self.last_read[node, dataset])
        return keeper, part

    def used_bytes(self, node: int) -> float:
        """Return the bytes held."""
        return float(self.held[node] @ self.sizes)

    def _available_bytes(self, node: int) -> float:
        """Return the bytes that are free, or can be freed."""
        return self._capacity - float((self.held[node] * (self.readers[node] > 0)) @ self.sizes)

    def _other_node(self, node: int, dataset: int) -> int:
        """Return the node with most room, of this one's zone if one there has some."""
        room = self._capacity - (self.held * (self.readers > 0)) @ self.sizes
        room -= self.held[:, dataset] * self.sizes[dataset]
        of_zone = np.where(self._zones == self._zones[node], room, -np.inf)
        best = int(of_zone.argmax())
        return best if of_zone[best] > 0.01 * self._capacity else int(room.argmax())

    def _evict(self, node: int, size: float) -> None:
        lacking = size - (self._capacity - self.used_bytes(node))
        order = np.argsort(self.last_read[node], kind="stable")
        for dataset in order[(self.held[node, order] > 0) & (self.readers[node, order] == 0)].tolist():
            if lacking <= 0:
                return
            gone = min(float(self.held[node, dataset]), lacking / float(self.sizes[dataset]))
            self.held[node, dataset] -= gone
            lacking -= gone * float(self.sizes[dataset])
