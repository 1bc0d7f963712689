"""The blocks of a snapshot as numbers, so that plans are arrays: their order, where each one is, and what samples they
make up.

May import numpy and cachefs.block.
"""
