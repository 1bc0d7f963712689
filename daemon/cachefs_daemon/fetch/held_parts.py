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
from cachefs_daemon.origin.patience import Patience

# Parts kept per block. Each part splits the rest of the block, and each remaining range takes a request of its own.
MOST_OF_BLOCK: Final = 2


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of a block."""

    begin: int  # offset in the block
    data: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


@dataclass(slots=True)
class _Block:
    parts: list[Part] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(len(part.data) for part in self.parts)


class HeldParts:
    """Keeps the parts of all blocks. Used on the event loop."""

    def __init__(self, room: int, dropped: Callable[[int], None]) -> None:
        """room: bytes to keep. dropped: called with the bytes of parts that are dropped without becoming part of a
        block."""
        self._room = room
        self._dropped = dropped
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # by key, oldest first
        self._bytes = 0

    def add(self, key: bytes, begin: int, data: Data) -> None:
        """Keep a copy of a part of a block. A copy, since *data* may lie in a larger buffer, which would stay in
        memory."""
        block = self._blocks.setdefault(key, _Block())
        part = Part(begin, bytes(data))
        if len(block.parts) >= MOST_OF_BLOCK or any(one.begin < part.end and begin < one.end for one in block.parts):
            self._dropped(len(data))
            return
        block.parts.append(part)
        self._bytes += len(data)
        while self._bytes > self._room and self._blocks:
            self.drop(next(iter(self._blocks)))

    def of(self, key: bytes) -> Sequence[Part]:
        """Return the kept parts of a block."""
        block = self._blocks.get(key)
        return block.parts if block is not None else ()

    def take(self, key: bytes) -> list[Part]:
        """Remove and return the parts of a block, ordered by offset, to become a part of the block."""
        block = self._blocks.pop(key, None)
        if block is None:
            return []
        self._bytes -= block.size
        return sorted(block.parts, key=lambda part: part.begin)

    def drop(self, key: bytes) -> None:
        """Drop the parts of a block: the block has arrived without them, or will not be fetched."""
        if parts := self.take(key):
            self._dropped(sum(len(part.data) for part in parts))


def gaps(parts: Sequence[Part], length: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each range of a block of *length* bytes outside of the *parts*, which must be in order."""
    begin = 0
    for part in parts:
        if part.begin > begin:
            yield begin, part.begin
        begin = part.end
    if begin < length:
        yield begin, length


class GaveUp(OriginUnavailable):
    """Raised instead of a retry. *seconds*: pause after which a retry would have been made."""

    def __init__(self, seconds: float) -> None:
        super().__init__("it is asked for in another way")
        self.seconds = seconds


async def give_up(seconds: float) -> None:
    """Raise GaveUp: used as the pause between attempts where no retry is wanted."""
    raise GaveUp(seconds)


async def completed(
    source: BlockSource, parts: Sequence[Part], patience: Patience, discard: Callable[[int], None], *, at_once: int
) -> Data:
    """Return the whole block: fetch the gaps around the *parts*, with up to *at_once* concurrent requests. discard:
    called with the bytes received if the fetch fails. Raises as `Origin.read` does."""
    data, one, turn = bytearray(source.length), source.range, asyncio.Semaphore(at_once)
    came = [len(part.data) for part in parts]
    failed: list[tuple[int, int, OriginUnavailable]] = []

    async def fill(begin: int, end: int, patience: Patience) -> None:
        wanted = ObjectRange(one.key, one.version, one.size, one.offset + begin, end - begin)
        between = await source.origin.read(wanted, patience)
        came.append(len(between))
        if len(between) != wanted.length:
            raise OriginError(f"{source.subject}: got {len(between)} bytes for {wanted.length}")
        data[begin:end] = between

    async def try_to_fill(begin: int, end: int) -> None:
        async with turn:
            try:
                # The block's own patience serves one request at a time.
                await fill(begin, end, Patience(patience.until, give_up))
            except OriginUnavailable as error:
                failed.append((begin, end, error))

    # Sequential requests leave the link idle for the latency of each: LMDB of 79 MB waited 0.4 s longer.
    tasks = [asyncio.create_task(try_to_fill(begin, end)) for begin, end in gaps(parts, source.length)]
    try:
        await asyncio.gather(*tasks)
        for begin, end, error in failed:
            if isinstance(error, GaveUp):
                await patience.rest(error.seconds)
            await fill(begin, end, patience)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        discard(sum(came))
        raise
    for part in parts:
        data[part.begin : part.end] = part.data
    return data
