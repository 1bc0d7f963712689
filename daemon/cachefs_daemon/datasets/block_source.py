"""Where the bytes of a block come from."""

from dataclasses import dataclass

from cachefs_daemon.origin.base import ObjectRange, Origin


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The origin of one block, and its bytes there."""

    # Key of the block.
    key: bytes
    origin: Origin
    # Which bytes of which object of the origin the block is.
    range: ObjectRange
    # Id of the snapshot for whose sake the block is fetched.
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
        """Is the block a whole object?"""
        return self.range.length == self.range.size

    @property
    def subject(self) -> str:
        """How a person calls the object."""
        return f"{self.origin.url}/{self.range.key.decode(errors='backslashreplace')}"
