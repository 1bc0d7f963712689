"""Which node of a cluster keeps which block: homes by rendezvous hashing, and copies by what the sequences say.

Every node computes all of it by itself, from the same facts, so it must come to the same result: whole arrays in a fixed
order, no dictionary's order, no sums of floats whose order may differ. Nodes are numbers in arrays: places in the list of
members, which is sorted by id. May import cachefs.planning.sequences and .blocks.
"""
