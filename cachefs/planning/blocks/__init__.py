"""The blocks of a snapshot as numbers, so that plans are arrays: their order, which of them are on this node, and which
samples they make up.

May import numpy and cachefs.block.
"""
