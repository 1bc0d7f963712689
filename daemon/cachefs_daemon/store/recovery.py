"""Opens the store, and makes index and segments agree after any crash.

The entries of the old index are used where a child process could read them; else a new index starts empty. The segments
decide: an entry whose bytes are not there is dropped, bytes without an entry are adopted if they are a record (keys are
content identities, so adopting is always right) and punched out if not. A rebuild is the same process with an empty
index.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.block import BlockLocation, is_sealed
from cachefs.systemd import StartupTimer
from cachefs_daemon.store.index_copy import copy_entries, make_empty
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import PAGE, covers, header_size, page_ceil, span
from cachefs_daemon.store.state_dir import StateDirectory
from cachefs_daemon.store.tier import Tier

_log = logging.getLogger(__name__)

# Entries of the index between two signs of progress.
_ENTRIES_PER_REPORT: Final = 1 << 16
_PAGES_BITS: Final = 32
_PAGES_MASK: Final = (1 << _PAGES_BITS) - 1

# Called for each block in each tier, oldest first, with the number of the tier, the block's key, and the bytes of its
# span.
AccountBlock = Callable[[int, bytes, int], None]
Range = tuple[int, int]


@dataclass(slots=True)
class _FoundSegment:
    # Where its file ends, in bytes.
    end: int
    # The ranges of its file that hold data.
    data: list[Range]
    # Keys of the blocks that the index has in this segment.
    keys: list[bytes] = field(default_factory=list)
    # For each of these keys two numbers, one after the other: the first page of its record, and how many pages it has.
    spans: "array[int]" = field(default_factory=lambda: array("Q"))


def open_index(state: StateDirectory) -> IndexWriter:
    """Return a new index with the entries of the newest old one, as far as it can be read. Raises CachefsError.

    The new index is renamed into place, in which it replaces the old one, when it is complete.
    """
    state.remove_leftovers()
    old = state.index_paths()
    path, draft = state.new_index_path(), state.draft_path
    reason = ""
    if old:
        reason = (
            "the machine restarted without a shutdown of the daemon"
            if state.is_torn()
            else copy_entries(old[-1], draft)
        )
    if not old or reason:
        state.remove_index(draft)
        make_empty(draft)
    if reason:
        _log.warning("index %s is not trusted (%s): rebuilding it from the segments as %s", old[-1], reason, path)
    state.mark_running()
    state.install_index(draft, path)
    index = IndexWriter(path)
    for each in old:
        state.remove_index(each)
    return index


def reconcile(index: IndexWriter, tiers: Sequence[Tier], remember: AccountBlock) -> None:
    """Make index and tiers agree, and account for every span."""
    time = StartupTimer()
    found = {tier.number: _survey(tier, time) for tier in tiers}
    dropped = _attach_entries(index, found, time)
    if dropped:
        _log.warning("dropped %d index entries that are damaged or whose bytes are missing", dropped)
    adopted = 0
    # Blocks that a tier evicts move down, so where tiers are one list of uses, the uses in the lower tier are older.
    for tier in reversed(tiers):
        for number, segment in found[tier.number].items():
            adopted += _account_for_segment(index, tier, number, segment, remember)
            time.extend_timeout()
        tier.refresh_limit()
    if adopted:
        _log.info("adopted %d blocks that the index did not know", adopted)
    index.commit()


def _survey(tier: Tier, time: StartupTimer) -> dict[int, _FoundSegment]:
    segments: dict[int, _FoundSegment] = {}
    try:
        numbers = tier.segment_numbers()
    except OSError as error:
        tier.disable(error)
        return segments
    failed: list[str] = []
    taken = 0
    for number in numbers:
        try:
            segments[number] = _FoundSegment(*tier.survey(number))
        except OSError as error:
            taken += tier.count_unusable_segment(number)
            failed.append(f"{number:08x}.seg: {error.strerror}")
        else:
            tier.free_unwritten(number, segments[number].data)
        time.extend_timeout()
    if failed:
        _log.error(
            "%s tier: %d of %d segments in %s cannot be used (%s); the %d bytes they take are counted, their blocks"
            " are fetched again; remove these files, or mend them and restart",
            tier.name, len(failed), len(numbers), tier.directory, failed[0], taken,
        )  # fmt: skip
    return segments


def _attach_entries(index: IndexWriter, found: Mapping[int, Mapping[int, _FoundSegment]], time: StartupTimer) -> int:
    """Attach each index entry to its segment. Delete entries without one, and return their number."""
    gone = []
    for number, (key, record) in enumerate(index.committed_entries()):
        if number % _ENTRIES_PER_REPORT == 0:
            time.extend_timeout()
        # A flipped bit in the key, the location or a checksum would otherwise hide a good block until it is evicted.
        if not is_sealed(key, record):
            gone.append(key)
            continue
        try:
            location = BlockLocation.unpack(record)
        except ValueError:
            gone.append(key)
            continue
        segment = found.get(location.tier, {}).get(location.segment)
        header = header_size(location.length)
        start, size = location.offset - header, page_ceil(header + location.length)
        if segment is None or start % PAGE or start < 0 or not covers(segment.data, start, start + size):
            gone.append(key)
        else:
            segment.keys.append(key)
            segment.spans.append(start // PAGE << _PAGES_BITS | size // PAGE)
    for key in gone:
        index.delete(key)
    return len(gone)


def _account_for_segment(
    index: IndexWriter, tier: Tier, number: int, segment: _FoundSegment, remember: AccountBlock
) -> int:
    """Account for one segment: its known blocks, then other data in it. Return the number of blocks adopted."""
    order = sorted(range(len(segment.keys)), key=segment.spans.__getitem__)
    known = []
    for at in order:
        start, pages = (segment.spans[at] >> _PAGES_BITS) * PAGE, (segment.spans[at] & _PAGES_MASK) * PAGE
        known.append((start, start + pages))
        remember(tier.number, segment.keys[at], pages)
    adopted: list[Range] = []
    garbage: list[Range] = []
    for gap in subtract(segment.data, known):
        taken = []
        try:
            for record in tier.records(number, [gap]):
                if index.get(record.key) is None:
                    index.put(record.key, record.location(tier.number, number))
                    remember(tier.number, record.key, span(record.length))
                    taken.append((record.start, record.start + span(record.length)))
        except OSError as error:
            _log.error(
                "%s tier: a part of segment %d cannot be read and is freed: %s", tier.name, number, error.strerror
            )
        adopted += taken
        garbage += subtract([gap], taken)
    tier.account_segment(number, segment.end, sum(end - start for start, end in known + adopted + garbage))
    tier.free_garbage(number, garbage)
    return len(adopted)


def subtract(ranges: Sequence[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """Yield the parts of the sorted *ranges* outside the sorted *taken* ranges."""
    at = 0
    for start, end in ranges:
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                yield start, taken[at][0]
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            yield start, end
