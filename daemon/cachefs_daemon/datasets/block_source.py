"""The origin of one block."""

from dataclasses import dataclass

from cachefs_daemon.origin.base import ObjectRange, Origin


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The origin of one block, and the block's bytes there."""

    # Key of the block.
    key: bytes
    origin: Origin
    # The bytes of the object that the block has.
    range: ObjectRange
    # Id of the snapshot for which the block is fetched.
    snapshot: str = ""
    # Number of its file in that snapshot, and of the block in the file.
    entry: int = 0
    number: int = 0

    @property
    def length(self) -> int:
        """Bytes of the block."""
        return self.range.length

    @property
    def is_whole(self) -> bool:
        """Whether the block is a whole object."""
        return self.range.length == self.range.size

    @property
    def subject(self) -> str:
        """The object's name in messages."""
        return f"{self.origin.url}/{self.range.key.decode(errors='backslashreplace')}"
