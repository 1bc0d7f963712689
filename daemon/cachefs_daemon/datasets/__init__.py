"""The datasets of this node: their names, origins, snapshots, and where the bytes of each block come from.

May import origin; knows no store.
"""
