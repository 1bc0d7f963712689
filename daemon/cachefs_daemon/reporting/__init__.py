"""Counts how much of each snapshot is on this node, by shard."""
