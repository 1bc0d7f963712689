"""Partial blocks: bytes that readers got before the rest of their block. They are kept until the rest has arrived, so
that no byte is fetched twice."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import OriginError, OriginUnavailable
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.base import Data, ObjectRange
from cachefs_daemon.origin.deadline import Deadline

# Parts kept per block. Each part splits the rest of the block, and each remaining range takes a request of its own.
MAX_PARTS_PER_BLOCK: Final = 2


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A byte range of a block."""

    begin: int  # offset in the block
    data: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


@dataclass(slots=True)
class _PartsOfBlock:
    parts: list[BlockPart] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(len(part.data) for part in self.parts)


class PartialBlocks:
    """Keeps the parts of all blocks. Used on the event loop."""

    def __init__(self, max_bytes: int, on_drop: Callable[[int], None]) -> None:
        """max_bytes: bytes to keep. on_drop: called with the bytes of parts that are dropped without becoming part of a
        block."""
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._blocks: OrderedDict[bytes, _PartsOfBlock] = OrderedDict()  # by key, oldest first
        self._bytes = 0

    def add_part(self, key: bytes, begin: int, data: Data) -> None:
        """Keep a copy of a part of a block. A copy, since *data* may lie in a larger buffer, which would stay in
        memory."""
        block = self._blocks.setdefault(key, _PartsOfBlock())
        part = BlockPart(begin, bytes(data))
        if len(block.parts) >= MAX_PARTS_PER_BLOCK or any(
            one.begin < part.end and begin < one.end for one in block.parts
        ):
            self._on_drop(len(data))
            return
        block.parts.append(part)
        self._bytes += len(data)
        while self._bytes > self._max_bytes and self._blocks:
            self.drop_parts(next(iter(self._blocks)))

    def parts_of(self, key: bytes) -> Sequence[BlockPart]:
        """Return the kept parts of a block."""
        block = self._blocks.get(key)
        return block.parts if block is not None else ()

    def pop_parts(self, key: bytes) -> list[BlockPart]:
        """Remove and return the parts of a block, ordered by offset, to become a part of the block."""
        block = self._blocks.pop(key, None)
        if block is None:
            return []
        self._bytes -= block.size
        return sorted(block.parts, key=lambda part: part.begin)

    def drop_parts(self, key: bytes) -> None:
        """Drop the parts of a block: the block has arrived without them, or will not be fetched."""
        if parts := self.pop_parts(key):
            self._on_drop(sum(len(part.data) for part in parts))


def gaps(parts: Sequence[BlockPart], length: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each range of a block of *length* bytes outside of the *parts*, which must be in order."""
    begin = 0
    for part in parts:
        if part.begin > begin:
            yield begin, part.begin
        begin = part.end
    if begin < length:
        yield begin, length


class RetrySkipped(OriginUnavailable):
    """Raised instead of a retry. *seconds*: pause after which a retry would have been made."""

    def __init__(self, seconds: float) -> None:
        super().__init__("it is requested in another way")
        self.seconds = seconds


async def skip_retry(seconds: float) -> None:
    """Raise RetrySkipped: used as the pause between attempts where no retry is wanted."""
    raise RetrySkipped(seconds)


async def read_with_parts(
    source: BlockSource, parts: Sequence[BlockPart], deadline: Deadline, discard: Callable[[int], None], *, at_once: int
) -> Data:
    """Return the whole block: fetch the gaps around the *parts*, with up to *at_once* concurrent requests. discard:
    called with the bytes received if the fetch fails. Raises as `Origin.read` does."""
    data, one, turn = bytearray(source.length), source.range, asyncio.Semaphore(at_once)
    came = [len(part.data) for part in parts]
    failed: list[tuple[int, int, OriginUnavailable]] = []

    async def fill(begin: int, end: int, deadline: Deadline) -> None:
        wanted = ObjectRange(one.key, one.version, one.size, one.offset + begin, end - begin)
        between = await source.origin.read(wanted, deadline)
        came.append(len(between))
        if len(between) != wanted.length:
            raise OriginError(f"{source.subject}: got {len(between)} bytes instead of {wanted.length}")
        data[begin:end] = between

    async def try_to_fill(begin: int, end: int) -> None:
        async with turn:
            try:
                # The block's own deadline serves one request at a time.
                await fill(begin, end, Deadline(deadline.until, skip_retry))
            except OriginUnavailable as error:
                failed.append((begin, end, error))

    # Sequential requests leave the link idle for the latency of each: LMDB of 79 MB waited 0.4 s longer.
    tasks = [asyncio.create_task(try_to_fill(begin, end)) for begin, end in gaps(parts, source.length)]
    try:
        await asyncio.gather(*tasks)
        for begin, end, error in failed:
            if isinstance(error, RetrySkipped):
                await deadline.pause(error.seconds)
            await fill(begin, end, deadline)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        discard(sum(came))
        raise
    for part in parts:
        data[part.begin : part.end] = part.data
    return data
