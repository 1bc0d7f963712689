"""What the nodes of a cluster have in common: datasets, the snapshots that are read on any node, and consumers."""
