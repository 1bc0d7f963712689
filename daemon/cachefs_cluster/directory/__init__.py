"""Shares datasets, the snapshots that are read on any node, and consumers among the nodes of a cluster."""
