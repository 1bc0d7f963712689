"""Blocks: their keys, their locations, and the checksums that verify their bytes.

A block is a whole file that is no larger than the snapshot's block size, else a part of a file of that size. Its key
identifies the content, so equal content has one copy for all snapshots and jobs. Each piece (128 KiB) of a block has
its own xxh3 checksum, so that a read of 128 KiB of a 4 MiB block verifies 128 KiB. The checksum is seeded with the
block's key and the piece's number: the right bytes of *another* block fail verification too, and a wrong entry of the
index never causes a wrong read.
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
# Maximum size in bytes of one read request of the kernel: 256 pages.
MAX_READ: Final = 1 << 20
KEY_SIZE: Final = 20
CONTENT_ID_SIZE: Final = 16

# Maximum number of blocks of a file whose tiers are shown, those of 32 GiB at the default block size: looking them up
# takes some 15 ms, and their text takes at most 58 of the 64 KiB that an extended attribute may have.
MAX_LOCATED_BLOCKS: Final = 8192

# xxhash releases the interpreter lock for larger pieces of data (bytes).
_DIGEST_CHUNK_BYTES: Final = 64 * 1024

_MASK = (1 << 64) - 1
_LENGTH = struct.Struct("<I")
_BLOCK_NUMBER = struct.Struct(">I")
_LOCATION = struct.Struct("<BxxxIQI")  # tier, segment, offset, length; the checksums follow
_SEAL = slice(1, 4)  # the padding after the tier
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """The location of one copy of a block."""

    # MEMORY or SSD.
    tier: int
    # Number of the segment file in the tier.
    segment: int
    # Offset of the block's first byte in the segment file.
    offset: int
    # Length of the block in bytes.
    length: int
    # Checksums of the block's pieces, concatenated: 8 bytes each, little-endian.
    checksums: bytes

    def pack(self) -> bytes:
        return _LOCATION.pack(self.tier, self.segment, self.offset, self.length) + self.checksums

    @classmethod
    def unpack(cls, record: bytes) -> "BlockLocation":
        """Return the location in a packed record. Raises ValueError where the record is cut off or implausible."""
        try:
            tier, segment, offset, length = _LOCATION.unpack_from(record)
        except struct.error as error:
            raise ValueError("location record is too short") from error
        checksums = bytes(record[_LOCATION.size :])
        if tier >= len(TIER_NAMES) or len(checksums) != 8 * piece_count(length):
            raise ValueError("location record is damaged")
        return cls(tier, segment, offset, length, checksums)


def seal_location(key: bytes, location: BlockLocation) -> bytes:
    """Return *location* as the index stores it: packed, with a seal of 24 bits that binds the record to the key."""
    record = bytearray(location.pack())
    record[_SEAL] = _compute_seal(key, record)
    return bytes(record)


def is_sealed(key: bytes, record: bytes) -> bool:
    """Return whether *record* was sealed for *key*. Misses a changed bit of either in 1 of 16 million cases."""
    return record[_SEAL] == _compute_seal(key, bytearray(record))


def _compute_seal(key: bytes, record: bytearray) -> bytes:
    record[_SEAL] = bytes(3)
    return xxh3_64_digest(key + record)[:3]


def content_id(identity: bytes, version: bytes, size: int, block_size: int) -> bytes:
    """Return the 16 bytes that identify one version of one object that is cut into blocks of *block_size* bytes.

    identity: the object's full name at its origin; version: its ETag, or a replacement for one.
    """
    total, of_block = b"%d" % size, b"%d" % block_size
    a, b, c, d = (len(identity), len(version), len(total), len(of_block))
    # Written out: a loop over the parts takes twice as long, 1 us more for each object of a snapshot that is built.
    pack = _LENGTH.pack
    return xxh3_128_digest(b"".join((pack(a), identity, pack(b), version, pack(c), total, pack(d), of_block)))


def block_key(content: bytes, number: int) -> bytes:
    """Return the key of block *number*. Keys of one content sort by number, so a file's blocks are a range."""
    return content + _BLOCK_NUMBER.pack(number)


def block_number(key: bytes) -> int:
    number: int = _BLOCK_NUMBER.unpack_from(key, CONTENT_ID_SIZE)[0]
    return number


def block_count(size: int, block_size: int) -> int:
    """Return the number of blocks of a file of *size* bytes; 0 for an empty file."""
    return -(-size // block_size)


def block_length(size: int, block_size: int, number: int) -> int:
    return min(block_size, size - number * block_size)


def piece_count(length: int) -> int:
    return -(-length // PIECE_SIZE)


def piece_checksums(key: bytes, data: bytes | bytearray | memoryview, first_piece: int = 0) -> bytes:
    """Return the checksums, 8 bytes each, of the pieces of the block *key* from number *first_piece* on, whose bytes
    are *data*.

    Keeps the interpreter lock: 2.5 us for 128 KiB. Releasing the lock took 2.3 us alone, and 300 beside a thread that
    wanted the lock.
    """
    view, seed, digests = memoryview(data), xxh3_64_intdigest(key), []
    for piece, start in enumerate(range(0, len(view), PIECE_SIZE), first_piece):
        digest = xxh3_64(seed=(seed + piece) & _MASK)
        for part in range(start, min(start + PIECE_SIZE, len(view)), _DIGEST_CHUNK_BYTES):
            digest.update(view[part : min(part + _DIGEST_CHUNK_BYTES, start + PIECE_SIZE)])
        digests.append(_CHECKSUM.pack(digest.intdigest()))
    return b"".join(digests)


def pieces_match(key: bytes, checksums: bytes, first_piece: int, data: memoryview) -> bool:
    """Return whether *data* has the right bytes of the pieces of the block *key* from number *first_piece* on.

    *data* ends where a piece or the block ends.
    """
    expected = checksums[8 * first_piece : 8 * (first_piece + piece_count(len(data)))]
    return expected == b"".join(_CHECKSUM.pack(digest) for digest in _piece_digests(key, data, first_piece))


def _piece_digests(key: bytes, data: memoryview, first_piece: int) -> Iterator[int]:
    seed = xxh3_64_intdigest(key)
    for piece, start in enumerate(range(0, len(data), PIECE_SIZE), first_piece):
        yield xxh3_64_intdigest(data[start : start + PIECE_SIZE], (seed + piece) & _MASK)


def describe_tiers(blocks: Iterable[BlockLocation | None], count: int) -> str:
    """Return the tier of each block of a file of *count* blocks, in runs: `memory` for a single block, or `ssd*3
    origin*2 memory` for several.

    blocks: locations of the first MAX_LOCATED_BLOCKS blocks, None for a block that is not on this node.
    """
    names = ("origin" if location is None else TIER_NAMES[location.tier] for location in blocks)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    if count > MAX_LOCATED_BLOCKS:
        runs.append(("more", count - MAX_LOCATED_BLOCKS))
    return " ".join(name if number == 1 and name != "more" else f"{name}*{number}" for name, number in runs)
