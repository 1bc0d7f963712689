"""Brings blocks onto this node, each one once: for readers that wait, and ahead of readers that will come.

May import mounts, datasets and store.
"""
