"""Validates the description of a consumer, with the same bounds for jobs of this node and for other nodes."""

import re
from typing import Final, Protocol

from cachefs.job_messages import MAX_CONSUMER_NAME, MAX_JOB_NAME
from cachefs.planning.sequences.sampler_spec import SamplerSpec

# Two jobs of different users may have one name, so job names contain the owner, in at most this many characters.
MAX_OWNER: Final = 32
MAX_LOADER: Final = 1 << 32  # no loader has more workers, batches or ranks
_JOB: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]*(~\w+)?")


class ConsumerDescription(Protocol):
    """A consumer as its job publishes it, and as nodes send it to each other."""

    @property
    def job(self) -> str: ...
    @property
    def consumer(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def spec(self) -> SamplerSpec | None: ...


def consumer_name(job: str, consumer: str) -> str:
    """Return the name under which a consumer's values are published. A job's name has no slash."""
    return f"{job}/{consumer}"


def is_consumer_name(name: str) -> bool:
    """Return whether *name* is one that `consumer_name` can return."""
    job, slash, consumer = name.partition("/")
    short = len(job) <= MAX_JOB_NAME + MAX_OWNER and len(consumer) <= MAX_CONSUMER_NAME
    return bool(slash) and short and _JOB.fullmatch(job) is not None and consumer.isprintable()


def check_consumer(value: ConsumerDescription) -> None:
    """Validate a consumer's description. A daemon applies the same bounds to its own jobs and to other nodes. Raises
    ValueError and ConfigError with a message."""
    require(is_consumer_name(consumer_name(value.job, value.consumer)), "an invalid consumer name")
    require(
        0 <= value.rank < value.world_size < MAX_LOADER,
        f"rank {value.rank} of {value.world_size}: expected a rank below the world size, and a world size below "
        f"{MAX_LOADER:,}",
    )
    for what, number in (
        ("workers", value.workers), ("samples in a batch", value.batch_size), ("batches", value.prefetch),
    ):  # fmt: skip
        require(0 <= number < MAX_LOADER, f"{number} {what}: expected 0 to {MAX_LOADER - 1:,}")
    if value.spec is not None:
        value.spec.check()


def require(condition: bool, problem: str) -> None:
    """Raise ValueError(*problem*) where *condition* is false."""
    if not condition:
        raise ValueError(problem)
