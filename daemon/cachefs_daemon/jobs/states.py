"""The states of jobs and of their consumers, as `cachectl job` shows them."""

from enum import StrEnum


class JobState(StrEnum):
    RUNNING = "running"
    ENDED = "ended"  # all of its consumers are through, or gone
    CANCELLED = "cancelled"  # somebody has said that it is to be forgotten


class ConsumerState(StrEnum):
    PREPARING = "preparing"  # what its samples are is being found out
    LEARNING = "learning"  # which files it reads is being learned, and known from its next epoch on
    WAITING = "waiting"  # it has not begun to read, or has not published any order
    FOLLOWING = "following"  # it reads what it has published
    STANDING_STILL = "standing still"  # nothing is seen of it, though it has begun
    NOT_FOLLOWED = "not followed"  # it reads something else, or what it published makes no sense
    ENDED = "ended"
