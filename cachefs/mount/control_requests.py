"""Collects requests that come in parts through the control file, until they are complete. Any user may write these
lines.

A pipe does not tell who wrote a line, but a line names a token, and the kernel knows which user the token belongs to
(cachefs.mount.control_directory). A token has room for a few requests. When all room is taken, the user who has most of
it loses the request that has waited longest for its next part. Users therefore cannot take each other's room: with as
many requests as there is room for, each user keeps an equal share. All tokens without a user together have the share of
one user.
"""

import zlib
from dataclasses import dataclass, field
from typing import Final

from cachefs.control_calls import MAX_REQUEST_BYTES, VERSION, RequestEnd, RequestPart
from cachefs.errors import Busy, ConfigError
from cachefs.largest_user import find_largest_user

# Most incomplete requests of one caller, and of all callers; and the bytes of all.
MAX_OF_CALLER: Final = 4
MAX_INCOMPLETE: Final = 256
MAX_BYTES: Final = 128 << 20
# Seconds without a further part after which a request is dropped.
PART_SECONDS: Final = 30.0


@dataclass(slots=True)
class _IncompleteRequest:
    # None where no user has looked the token up.
    user: int | None = None
    data: bytearray = field(default_factory=bytearray)
    # Time of the last part.
    latest: float = 0.0


class IncompleteRequests:
    """The incomplete requests. *now* is seconds of a monotonic clock."""

    def __init__(self) -> None:
        # (token, call number) -> the parts so far. The request that has waited longest for a part comes first.
        self._incomplete: dict[tuple[str, int], _IncompleteRequest] = {}
        self._bytes = 0

    def add_part(self, part: RequestPart, now: float, user: int | None = None) -> None:
        """Append a part. Raises Busy where the part does not follow the last one or its *user* exceeds a fair share of
        the room, and ConfigError where the request is too large."""
        self._drop_old(now)
        key = part.answers, part.id
        begun = _IncompleteRequest(user) if part.at == 0 else self._incomplete.get(key)
        if begun is None or part.at != len(begun.data):
            self._drop(key)
            raise Busy(f"a part at {part.at} does not follow the bytes received so far; the call is dropped")
        if len(begun.data) + len(part.data) > MAX_REQUEST_BYTES:
            self._drop(key)
            raise ConfigError(f"a call of more than {MAX_REQUEST_BYTES >> 20} MiB; use the daemon's socket")
        self._drop(key)
        self._make_room(part.answers, begun.user, len(begun.data) + len(part.data))
        begun.data += part.data
        begun.latest = now
        self._incomplete[key] = begun
        self._bytes += len(begun.data)

    def complete_request(self, call: RequestEnd, now: float) -> bytes:
        """Return all bytes of the request. Raises Busy where some are missing, and ConfigError where the bytes do not
        match the call or the mount is too old for it."""
        self._drop_old(now)
        begun = self._drop((call.answers, call.id))
        request = bytes(begun.data) + call.data if begun is not None else call.data
        if call.version > VERSION:
            raise ConfigError(
                f"a call of version {call.version}; this mount knows {VERSION}. Mount with a newer cachefs"
            )
        if len(request) < call.size:
            raise Busy(
                f"the mount has kept {len(request)} of the {call.size} bytes of a call: too many calls came at "
                "once, or its lines came too slowly; try again"
            )
        if len(request) != call.size or zlib.crc32(request) != call.crc:
            raise ConfigError(f"a call announced {call.size} bytes; {len(request)} arrived, or their checksum differs")
        return request

    def _make_room(self, caller: str, user: int | None, size: int) -> None:
        """Drop requests until *size* more bytes and one more request fit. Raises Busy where *user* has most of the room
        and no other request to drop."""
        own = [key for key in self._incomplete if key[0] == caller]
        for key in own[: max(0, len(own) + 1 - MAX_OF_CALLER)]:
            self._drop(key)
        while len(self._incomplete) >= MAX_INCOMPLETE:
            self._drop_oldest_of(find_largest_user(((begun.user, 1) for begun in self._incomplete.values()), user, 1))
        while self._bytes + size > MAX_BYTES:
            self._drop_oldest_of(
                find_largest_user(((begun.user, len(begun.data)) for begun in self._incomplete.values()), user, size)
            )

    def _drop_oldest_of(self, user: int | None) -> None:
        """Drop the request of *user* that has waited longest. Raises Busy where the user has none."""
        key = next((key for key, begun in self._incomplete.items() if begun.user == user), None)
        if key is None:
            raise Busy("too many calls are on their way through the mount at once; try again")
        self._drop(key)

    def _drop_old(self, now: float) -> None:
        for key in [key for key, begun in self._incomplete.items() if now - begun.latest > PART_SECONDS]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> _IncompleteRequest | None:
        begun = self._incomplete.pop(key, None)
        if begun is not None:
            self._bytes -= len(begun.data)
        return begun
