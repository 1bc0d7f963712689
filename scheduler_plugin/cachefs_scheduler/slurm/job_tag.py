"""What a job reads, as its comments say it: `cachefs:imagenet@latest,policy=suspend,max-jobs-per-copy=4`.

Lua writes it into the job's admin comment, with what it has done; users may write it into their own.
"""

import re
from dataclasses import dataclass
from typing import Final

from cachefs.scheduling_messages import MOST_JOBS_PER_COPY, Policy

_TAG: Final = re.compile(r"(?:^|[\s;])cachefs:([^\s;,]+)((?:,[a-z-]+=[^\s;,]+)*)")
_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9]{1,64})?")
_MOST: Final = 4096  # characters of a comment that are looked at


_HELD: Final = re.compile(r"(cachefs:[^\s;]*),held=yes")


@dataclass(frozen=True, slots=True)
class JobTag:
    """What is said of one job."""

    dataset: str
    policy: Policy = Policy.PREFER
    max_jobs_per_copy: int = 0
    # The job's own begin time in seconds since 1970, where it had one.
    begin: int = 0
    # Was it held when it was submitted, for us to release it?
    held: bool = False

    @property
    def waits(self) -> bool:
        """Is the service to be asked whether it may start?"""
        return self.policy == Policy.SUSPEND


def released(comment: str) -> str:
    """The comment of a job that we hold no longer. Where it is held once more, that is its user's wish."""
    return _HELD.sub(r"\1", comment)


def tag_of(*comments: str) -> JobTag | None:
    """The first comment that says something of a dataset counts. None: no comment does, or not rightly."""
    for comment in comments:
        # The last one: Lua adds its own behind what was there.
        found = list(_TAG.finditer(comment[:_MOST]))
        if found:
            words = dict(word.split("=", 1) for word in found[-1][2].split(",") if word)
            return _tag(found[-1][1], words)
    return None


def _tag(dataset: str, words: dict[str, str]) -> JobTag | None:
    policy = words.get("policy", Policy.PREFER)
    if not _DATASET.fullmatch(dataset) or policy not in list(Policy):
        return None
    jobs, begin = _number(words.get("max-jobs-per-copy", "0")), _number(words.get("begin", "0"))
    return JobTag(dataset, Policy(policy), min(jobs, MOST_JOBS_PER_COPY), begin, words.get("held") == "yes")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0
