"""Interfaces between fetching ahead and the parts of the node that know its readers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachefs.planning.pagecache.push_plan import FileBlocks


@dataclass(frozen=True, slots=True)
class ReaderCallbacks:
    """Functions of the parts that know consumers and mounts, so that fetching need not depend on those parts."""

    # Returns, by consumer, the seconds by which it may be ahead of its planned position.
    margins: Callable[[], Mapping[str, float]]
    # Called for each fetched block with its consumer (key in the plan), its number in the consumer's space, its bytes,
    # and its source: empty for an origin.
    on_fetched: Callable[[str, int, int, str], None]
    # Whether pages are being pushed to mounts straight from the SSD tier, so that a copy in memory would be redundant.
    is_pushing: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class PageCacheCallbacks:
    """Functions of the part that knows the pushers of mounts, so that guessing need not depend on that part."""

    # Returns whether pages are pushed to the mount with this id.
    is_pushed_to: Callable[[str], bool]
    # Pushes blocks of so many bytes into the mount's page cache.
    push: Callable[[str, FileBlocks, int], None]
