"""What fetching ahead asks and tells those parts of the node that know its readers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachefs.planning.pagecache.orders import FileBlocks


@dataclass(frozen=True, slots=True)
class Readers:
    """Functions of the parts that know consumers and mounts, so that fetching need not know those parts."""

    # By consumer, seconds by which it may be ahead of where the plan has it.
    margins: Callable[[], Mapping[str, float]]
    # Is told of a consumer (its key in the plan), of a block that was fetched for its sake (its number in the space of
    # what the consumer reads, and its bytes), and what has brought it: empty for an origin.
    fetched: Callable[[str, int, int, str], None]
    # True while pages are pushed to mounts straight from the SSD tier, so that a copy in memory would be one too many.
    pushing: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class PageCaches:
    """Functions of the part that knows the pushers of mounts, so that guessing need not know that part."""

    # Are pages pushed to the mount with this id?
    takes: Callable[[str], bool]
    # Has blocks of so many bytes stored in that mount's page cache.
    push: Callable[[str, FileBlocks, int], None]
