"""The published sequences: orders that samplers determine, the plan built from them, and each consumer's position.

`plan` is the door to what is known of the future, `follower` and `position_estimate` to a consumer's position. May
import cachefs.planning.blocks.
"""
