"""Numbers the blocks of a snapshot, so that plans are arrays: their order, presence on this node, and samples.

May import numpy and cachefs.block.
"""
