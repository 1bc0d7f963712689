"""Blocks: their names, their locations, and the checksums that prove their bytes right.

A block is a whole file that is no larger than the snapshot's block size, else a part of a file of that size. Its key is
made of what identifies the content, so equal content has one copy, whatever snapshot or job reads it. Every piece (128
KiB) of a block has its own xxh3 checksum, so that a read of 128 KiB of a 4 MiB block verifies 128 KiB. The checksum is
seeded with the block's key and the piece's number. So the right bytes of *another* block fail it too, and a wrong entry
of the index is never a wrong read.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest, xxh3_128_digest

MEMORY: Final = 0
SSD: Final = 1
TIER_NAMES: Final = ("memory", "ssd")

PIECE_SIZE: Final = 128 * 1024
# Bytes that the kernel asks a mount for at once, at most: 256 pages.
MAX_READ: Final = 1 << 20
KEY_SIZE: Final = 20
CONTENT_ID_SIZE: Final = 16

# Blocks of a file whose tier is told, those of 32 GiB at the default block size: they take some 15 ms to look up, and
# their tiers as text take at most 58 of the 64 KiB that an extended attribute may have.
MOST_LOCATED: Final = 8192

# xxhash lets go of the interpreter lock for more bytes than that.
_LOCKED: Final = 64 * 1024

_MASK = (1 << 64) - 1
_LENGTH = struct.Struct("<I")
_BLOCK_NUMBER = struct.Struct(">I")
_LOCATION = struct.Struct("<BxxxIQI")  # tier, segment, offset, length; the checksums follow
_SEAL = slice(1, 4)  # the padding after the tier
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Location:
    """Where one copy of a block is."""

    # MEMORY or SSD.
    tier: int
    # Number of the segment file in the tier.
    segment: int
    # Where the block's first byte is in the segment file, in bytes from its start.
    offset: int
    # Bytes of the block.
    length: int
    # The checksums of its pieces, one after the other: 8 bytes each, little-endian.
    checksums: bytes

    def pack(self) -> bytes:
        return _LOCATION.pack(self.tier, self.segment, self.offset, self.length) + self.checksums

    @classmethod
    def unpack(cls, record: bytes) -> "Location":
        """Raises ValueError where *record* is not a whole, plausible location."""
        try:
            tier, segment, offset, length = _LOCATION.unpack_from(record)
        except struct.error as error:
            raise ValueError("location record is too short") from error
        checksums = bytes(record[_LOCATION.size :])
        if tier >= len(TIER_NAMES) or len(checksums) != 8 * piece_count(length):
            raise ValueError("location record is damaged")
        return cls(tier, segment, offset, length, checksums)


def sealed(key: bytes, location: Location) -> bytes:
    """*location* as the index stores it: packed, with 24 bits in it that prove that key and record belong together."""
    record = bytearray(location.pack())
    record[_SEAL] = _seal(key, record)
    return bytes(record)


def is_sealed(key: bytes, record: bytes) -> bool:
    """Is *record* what was stored for *key*? False where a bit of either has changed, but for 1 in 16 million."""
    return record[_SEAL] == _seal(key, bytearray(record))


def _seal(key: bytes, record: bytearray) -> bytes:
    record[_SEAL] = bytes(3)
    return xxh3_64_digest(key + record)[:3]


def content_id(identity: bytes, version: bytes, size: int, block_size: int) -> bytes:
    """The 16 bytes that name one version of one object that is cut into blocks of *block_size* bytes.

    identity: the object's full name at its origin; version: its ETag, or what stands in for one.
    """
    total, of_block = b"%d" % size, b"%d" % block_size
    a, b, c, d = (len(identity), len(version), len(total), len(of_block))
    # A loop over the parts takes twice as long, 1 us for each object of a snapshot that is built.
    pack = _LENGTH.pack
    return xxh3_128_digest(b"".join((pack(a), identity, pack(b), version, pack(c), total, pack(d), of_block)))


def block_key(content: bytes, number: int) -> bytes:
    """The key of block *number*. The keys of one content follow each other in order, so a file's blocks are a range."""
    return content + _BLOCK_NUMBER.pack(number)


def block_number(key: bytes) -> int:
    number: int = _BLOCK_NUMBER.unpack_from(key, CONTENT_ID_SIZE)[0]
    return number


def block_count(size: int, block_size: int) -> int:
    """How many blocks a file of *size* bytes has; an empty one has none."""
    return -(-size // block_size)


def block_length(size: int, block_size: int, number: int) -> int:
    return min(block_size, size - number * block_size)


def piece_count(length: int) -> int:
    return -(-length // PIECE_SIZE)


def piece_checksums(key: bytes, data: bytes | bytearray | memoryview, first_piece: int = 0) -> bytes:
    """The checksums of the pieces of the block *key* from number *first_piece* on, whose bytes are *data*: 8 bytes for
    each piece.

    It keeps the interpreter lock: 2.5 us for 128 KiB, where to give it away and wait for it took 300 beside a thread
    that wanted it, and 2.3 us alone.
    """
    view, seed, digests = memoryview(data), xxh3_64_intdigest(key), []
    for piece, start in enumerate(range(0, len(view), PIECE_SIZE), first_piece):
        digest = xxh3_64(seed=(seed + piece) & _MASK)
        for part in range(start, min(start + PIECE_SIZE, len(view)), _LOCKED):
            digest.update(view[part : min(part + _LOCKED, start + PIECE_SIZE)])
        digests.append(_CHECKSUM.pack(digest.intdigest()))
    return b"".join(digests)


def pieces_match(key: bytes, checksums: bytes, first_piece: int, data: memoryview) -> bool:
    """Are *data* the pieces of the block *key* from number *first_piece* on?

    *data* ends where a piece or the block ends.
    """
    expected = checksums[8 * first_piece : 8 * (first_piece + piece_count(len(data)))]
    return expected == b"".join(_CHECKSUM.pack(digest) for digest in _digests(key, data, first_piece))


def _digests(key: bytes, data: memoryview, first_piece: int) -> Iterator[int]:
    seed = xxh3_64_intdigest(key)
    for piece, start in enumerate(range(0, len(data), PIECE_SIZE), first_piece):
        yield xxh3_64_intdigest(data[start : start + PIECE_SIZE], (seed + piece) & _MASK)


def describe_tiers(blocks: Iterable[Location | None], count: int) -> str:
    """Say which tier each block of a file of *count* blocks is in, in runs: `memory` for a single block, or
    `ssd*3 origin*2 memory` for several.

    blocks: where the first MOST_LOCATED of them are, None for one that is not on this node.
    """
    names = ("origin" if location is None else TIER_NAMES[location.tier] for location in blocks)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    if count > MOST_LOCATED:
        runs.append(("more", count - MOST_LOCATED))
    return " ".join(name if number == 1 and name != "more" else f"{name}*{number}" for name, number in runs)
