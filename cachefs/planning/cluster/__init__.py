"""Decides which node of a cluster keeps which block: homes by rendezvous hashing, copies by the published sequences.

Every node computes the placement by itself, and all must get the same result. The data are therefore arrays in a fixed
order, and sums of whole numbers. Nodes are numbers here: indices in the list of members, which is sorted by id. May
import cachefs.planning.sequences and .blocks.
"""
