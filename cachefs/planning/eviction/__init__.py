"""Decides which blocks a tier takes and which it evicts: policies, quotas of datasets, and moves between tiers.

May import cachefs.planning.pagecache, .sequences and .blocks.
"""
