"""What is in the kernel's page cache in front of the tiers, and which pages to push into it or to drop.

May import cachefs.planning.sequences and .blocks.
"""
