"""Which node of a cluster keeps which block: homes by rendezvous hashing, and copies by what the sequences say.

Every node computes all of it by itself and must come to the same result. So these are arrays in a fixed order, and sums
of whole numbers. Nodes are numbers there: places in the list of members, which is sorted by id. May import
cachefs.planning.sequences and .blocks.
"""
