"""The datasets of this node: their names, origins and snapshots, and the source of each block's bytes.

May import origin, but not store.
"""
