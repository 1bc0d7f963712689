"""Where the bytes of a block come from."""

from dataclasses import dataclass

from cachefs_daemon.origin.base import ObjectRange, Origin


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The origin of one block, and its bytes there."""

    # Of the block.
    key: bytes
    origin: Origin
    # The bytes of the block, in an object of the origin.
    range: ObjectRange
    # Id of the snapshot for which the block is asked for.
    snapshot: str = ""

    @property
    def length(self) -> int:
        """Bytes of the block."""
        return self.range.length

    @property
    def subject(self) -> str:
        """How a person calls the object."""
        return f"{self.origin.url}/{self.range.key.decode(errors='backslashreplace')}"
