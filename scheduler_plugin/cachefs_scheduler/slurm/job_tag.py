"""Parses job comments: `cachefs:imagenet@latest,policy=suspend,max-jobs-per-copy=4`.

Lua writes the tag into the job's admin comment, with the changes it has made; users may write it into their comment.
"""

import re
from dataclasses import dataclass
from typing import Final

from cachefs.scheduling_messages import MAX_JOBS_PER_COPY, PlacementPolicy

_TAG: Final = re.compile(r"(?:^|[\s;])cachefs:([^\s;,]+)((?:,[a-z-]+=[^\s;,]+)*)")
_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9]{1,64})?")
_MAX_COMMENT: Final = 4096  # characters of a comment that are parsed


_HELD: Final = re.compile(r"(cachefs:[^\s;]*),held=yes")


@dataclass(frozen=True, slots=True)
class JobTag:
    """The tag of a job."""

    dataset: str
    policy: PlacementPolicy = PlacementPolicy.PREFER
    max_jobs_per_copy: int = 0
    # The job's original begin time (Unix), if it had one.
    begin: int = 0
    # Whether the job was held at submission, to be released by this program.
    held: bool = False

    @property
    def can_wait(self) -> bool:
        """Return whether the service decides when the job starts."""
        return self.policy == PlacementPolicy.SUSPEND


def released_comment(comment: str) -> str:
    """Return the comment of a job after its release: if it is held again, that is the user's wish."""
    return _HELD.sub(r"\1", comment)


def parse_tag(*comments: str) -> JobTag | None:
    """Return the tag of the first comment with one; None if there is none, or it is invalid."""
    for comment in comments:
        # The last tag counts: Lua appends its own.
        found = list(_TAG.finditer(comment[:_MAX_COMMENT]))
        if found:
            words = dict(word.split("=", 1) for word in found[-1][2].split(",") if word)
            return _tag(found[-1][1], words)
    return None


def _tag(dataset: str, words: dict[str, str]) -> JobTag | None:
    policy = words.get("policy", PlacementPolicy.PREFER)
    if not _DATASET.fullmatch(dataset) or policy not in list(PlacementPolicy):
        return None
    jobs, begin = _number(words.get("max-jobs-per-copy", "0")), _number(words.get("begin", "0"))
    return JobTag(dataset, PlacementPolicy(policy), min(jobs, MAX_JOBS_PER_COPY), begin, words.get("held") == "yes")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0
