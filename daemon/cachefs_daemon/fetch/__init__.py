"""Fetches blocks onto this node, each one once: on demand for waiting readers, and ahead of future reads.

May import ports, datasets, store, origin and fetch_process.
"""
