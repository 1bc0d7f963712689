"""What fetching ahead asks and tells those parts of the node that know its readers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readers:
    """Functions of the parts that know consumers and mounts, so that fetching need not know those parts."""

    # By consumer, seconds by which it may be ahead of where the plan has it.
    margins: Callable[[], Mapping[str, float]]
    # Is told of a consumer (its key in the plan) and of bytes that were fetched for its sake.
    fetched: Callable[[str, int], None]
    # True while pages are pushed to mounts straight from the SSD tier, so that a copy in memory would be one too many.
    pushing: Callable[[], bool]
