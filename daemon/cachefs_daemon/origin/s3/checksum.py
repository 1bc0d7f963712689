"""Verifies the checksums that an S3 server sends with a whole object.

Only checksums that the standard library computes quickly are verified: CRC-32 takes 30 us for 110 KB, SHA-256 60. A
plain installation has no library for CRC-32C and CRC-64/NVME, the default of AWS.
"""

import asyncio
import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from cachefs_daemon.origin.s3.response import BrokenS3Response

# The header that requests checksums, as botocore sends it.
CHECKSUM_HEADER: Final = ("x-amz-checksum-mode", "ENABLED")

_CRC32: Final = b"x-amz-checksum-crc32"
_SHA256: Final = b"x-amz-checksum-sha256"
_KINDS: Final[dict[bytes, Callable[[memoryview], bytes]]] = {
    _CRC32: lambda data: zlib.crc32(data).to_bytes(4, "big"),
    _SHA256: lambda data: hashlib.sha256(data).digest(),
}
_TYPE: Final = b"x-amz-checksum-type"
# Most bytes that are hashed on the event loop: a third of a millisecond.
_SHORT: Final = 1 << 20


def has_checksum(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether there is a checksum to verify."""
    return _CRC32 in headers or _SHA256 in headers


async def verify_checksum(data: memoryview, headers: Mapping[bytes, bytes]) -> None:
    """Verify a whole object. headers: of the response, by name in lower case. Raises BrokenS3Response."""
    for name, count in _KINDS.items():
        value = headers.get(name)
        # A checksum of the part checksums has another type, or the number of parts behind it.
        if value is None or b"-" in value or headers.get(_TYPE, b"FULL_OBJECT") != b"FULL_OBJECT":
            continue
        try:
            expected = base64.b64decode(value, validate=True)
        except binascii.Error:
            raise BrokenS3Response(f"its {name.decode()} is {value[:80]!r}") from None
        found = count(data) if len(data) <= _SHORT else await asyncio.to_thread(count, data)
        if found != expected:
            raise BrokenS3Response(f"its bytes do not have the {name.decode()} that the server sent with them")
