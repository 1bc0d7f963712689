"""Who reads which block when: orders that samplers determine, the plan made of them, and where each consumer is in it.

`plan` is the door to what is known of the future, `follower` and `position` to where a consumer is. May import
cachefs.planning.blocks.
"""
