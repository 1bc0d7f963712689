"""Models the kernel's page cache in front of the tiers, and decides which pages to push into it or to drop.

The doors are `push_plan` for pushing, and `states` for eviction. May import cachefs.planning.sequences and .blocks.
"""
