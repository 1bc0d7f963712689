"""`cachectl bench DATASET`: what a training job of a given rate would get from the user's own data, origin and disks.

A trial asks the origin, mounts the dataset for itself, runs a short paced job over files that are not on the node yet,
and compares warm reads with those of a native copy. `verdict` says in words what the figures mean, without I/O.
"""
