"""The requests that come in parts through the control file, until they are complete. Anybody may write these lines."""

import zlib
from dataclasses import dataclass, field
from typing import Final

from cachefs.control_calls import MAX_REQUEST, VERSION, Call, Part
from cachefs.errors import ConfigError

# Requests that are not complete, and their bytes.
MOST_BEGUN: Final = 256
MOST_BYTES: Final = 128 << 20
# Seconds after which one is dropped of which no further part comes.
PART_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Begun:
    data: bytearray = field(default_factory=bytearray)
    # When its last part came.
    latest: float = 0.0


class Requests:
    """Requests that are not complete. *now* is seconds of a monotonic clock."""

    def __init__(self) -> None:
        # Token and number of the call -> what has come of it. The one that has waited longest for a part comes first.
        self._begun: dict[tuple[str, int], _Begun] = {}
        self._bytes = 0

    def add(self, part: Part, now: float) -> None:
        """Raises ConfigError where the part does not follow the last one, or there is no room."""
        self._drop_old(now)
        key = part.answers, part.id
        begun = _Begun() if part.at == 0 else self._begun.get(key)
        if begun is None or part.at != len(begun.data):
            self._drop(key)
            raise ConfigError(f"a part at {part.at} of a call of which other bytes came before; it is dropped")
        if len(begun.data) + len(part.data) > MAX_REQUEST:
            self._drop(key)
            raise ConfigError(f"a call of more than {MAX_REQUEST >> 20} MiB; use the daemon's socket")
        self._drop(key)
        if len(self._begun) >= MOST_BEGUN or self._bytes + len(begun.data) + len(part.data) > MOST_BYTES:
            raise ConfigError("too many calls of several lines at once; the latest is dropped")
        begun.data += part.data
        begun.latest = now
        self._begun[key] = begun
        self._bytes += len(begun.data)

    def complete(self, call: Call, now: float) -> bytes:
        """All bytes of the request. Raises ConfigError where some are missing, or the mount is too old for it."""
        self._drop_old(now)
        begun = self._drop((call.answers, call.id))
        request = bytes(begun.data) + call.data if begun is not None else call.data
        if call.version > VERSION:
            raise ConfigError(
                f"a call of version {call.version}; this mount knows {VERSION}. Mount with a newer cachefs"
            )
        if len(request) != call.size or zlib.crc32(request) != call.crc:
            raise ConfigError(f"{call.size} bytes of a call were announced, and {len(request)} came, or other ones")
        return request

    def _drop_old(self, now: float) -> None:
        for key in [key for key, begun in self._begun.items() if now - begun.latest > PART_SECONDS]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> _Begun | None:
        begun = self._begun.pop(key, None)
        if begun is not None:
            self._bytes -= len(begun.data)
        return begun
