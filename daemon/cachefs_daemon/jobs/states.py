"""The states of jobs and of their consumers, as `cachectl job` shows them."""

from enum import StrEnum


class JobState(StrEnum):
    RUNNING = "running"
    ENDED = "ended"  # all of its consumers have finished, or are gone
    CANCELLED = "cancelled"  # cancelled by a user


class ConsumerState(StrEnum):
    PREPARING = "preparing"  # its samples are being resolved
    LEARNING = "learning"  # its files are being learned, and are known from its next epoch on
    WAITING = "waiting"  # it has not begun to read, or has not published any order
    FOLLOWING = "following"  # it reads what it has published
    STANDING_STILL = "standing still"  # it has begun, but no read is seen
    NOT_FOLLOWED = "not followed"  # it reads something else, or its publication makes no sense
    ENDED = "ended"
