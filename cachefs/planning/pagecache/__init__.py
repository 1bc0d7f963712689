"""What is in the kernel's page cache in front of the tiers, and which pages to push into it or to drop.

The doors are `push_plan` for whoever pushes, and `coverage` for whoever evicts. May import cachefs.planning.sequences
and .blocks.
"""
