"""Which blocks a tier takes and which it evicts: policies, quotas of datasets, and what becomes of a block in between.

May import cachefs.planning.pagecache, .sequences and .blocks.
"""
