"""`cachectl bench DATASET`: predicts the speed of a training job of a given rate on the user's own data, origin and
disks.

A trial measures the origin, mounts the dataset for itself, runs a short paced job over files that are not on the node
yet, and compares warm reads with those of a native copy. `verdict` puts the figures into words, without I/O.
"""
