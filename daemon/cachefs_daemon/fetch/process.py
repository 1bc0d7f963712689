"""The daemon's side of one fetch process (see cachefs_daemon.fetch_process): start, commands, reports, end."""

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs_daemon.fetch.load import Load
from cachefs_daemon.fetch_process.channel import Channel, Closed
from cachefs_daemon.fetch_process.frames import Batch, Done, Failed, NumberedWay, Report, Segment, Wanted
from cachefs_daemon.origin.ledger import ChildBook
from cachefs_daemon.origin.order import Way
from cachefs_daemon.store.reserved_rooms import OpenSegment, Room

# Ways that are remembered. The process itself remembers a few more, the most recently used.
_WAYS: Final = 32


def start(longest: float) -> "FetchProcess":
    """Start a new process. Call in a thread that lives as long as the daemon, as the process ends with that thread.
    Raises OSError.

    longest: seconds after which the process gives up a block.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        book = ChildBook()
    except OSError:
        ours.close()
        theirs.close()
        raise
    with theirs:
        number = str(theirs.fileno())
        command = [
            sys.executable, "-P", "-m", "cachefs_daemon.fetch_process",
            "--channel", number, "--parent", str(os.getpid()), "--longest", str(longest),
            "--requests", str(book.descriptor),
        ]  # fmt: skip
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), book.descriptor),
            )
        except OSError:
            ours.close()
            book.close()
            raise
    return FetchProcess(process, Channel[Batch, Report](ours, Report), book)


@dataclass(slots=True, eq=False)
class FetchProcess:
    """A running fetch process, and the blocks that it is fetching. Used on the event loop."""

    process: subprocess.Popen[bytes]
    channel: Channel[Batch, Report]
    # Counts the requests that the process sends.
    book: ChildBook
    # Whether the process has sent a first report.
    ready: bool = False
    # Whether the channel is closed; and whether that was because the process was idle.
    closed: bool = False
    retired: bool = False
    # Loop times: of the start; since when the process has been silent; and of the last command.
    started: float = 0.0
    heard: float = 0.0
    used: float = 0.0
    # Blocks written so far, and their bytes.
    blocks: int = 0
    bytes: int = 0
    # Blocks in progress, with their rooms, by number.
    under_way: dict[int, tuple[Load, Room]] = field(default_factory=dict)
    _ways: OrderedDict[Way, int] = field(default_factory=OrderedDict)
    _next: int = 0

    def send(self, loads: Sequence[tuple[Load, Room]], segments: Sequence[OpenSegment], now: float) -> bool:
        """Send a batch of blocks to fetch into their rooms, which lie in these segments. Returns False if it could not
        be sent; the process then writes nothing. now: loop time."""
        places = {(segment.tier, segment.number): at for at, segment in enumerate(segments)}
        ways: list[NumberedWay] = []
        last, way = None, 0
        wanted: list[Wanted] = []
        for load, room in loads:
            order = load.order
            if order.way is not last:  # most are the same object, and a comparison takes 5 us
                last = order.way
                if last not in self._ways:
                    ways.append(NumberedWay(self._name(last), last))
                way = self._ways[last]
            self._next += 1
            at = places[room.tier, room.segment]
            wanted.append(Wanted(self._next, way, order.key, order.etag, room.length, room.key, at, room.start))
        files = [Segment(segment.number, segment.allocate) for segment in segments]
        try:
            told = self.channel.send(Batch(ways, files, wanted), [segment.descriptor for segment in segments])
        except Closed:
            told = False
        if told:
            self.used = now
            if not self.under_way:
                self.heard = now  # an idle process is rightly silent
            self.under_way.update(zip((one.number for one in wanted), loads, strict=True))
        else:
            self._ways.clear()  # the process has not received the new ones
        return told

    def answers(self) -> Iterator[tuple[Load, Room, Done | Failed]]:
        """Yield all results received since the last call. Raises Closed."""
        while (message := self.channel.receive()) is not None:
            report, _ = message
            self.ready = True
            answers: list[Done | Failed] = [*report.done, *report.failed]
            for answer in answers:
                known = self.under_way.pop(answer.number, None)
                if known is None:
                    raise Closed
                yield *known, answer

    def kill(self) -> None:
        """Kill the process without waiting for its end: a process that hangs at a disk ends when the disk responds."""
        self.process.kill()

    def _name(self, way: Way) -> int:
        self._next += 1
        self._ways[way] = self._next
        if len(self._ways) > _WAYS:
            self._ways.popitem(last=False)
        return self._next
