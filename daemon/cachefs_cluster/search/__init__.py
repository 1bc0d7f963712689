"""Finds blocks on other nodes: which of them may have a block, and in which order they are asked."""
