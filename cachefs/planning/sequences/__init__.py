"""Who reads which block when: orders that samplers determine, the plan made of them, and where each consumer is in it.

May import cachefs.planning.blocks.
"""
