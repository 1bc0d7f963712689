"""One fetch process (see cachefs_daemon.fetch_process), as the daemon has it: started, told, listened to, ended."""

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

# Ways that it remembers. The process itself remembers a few more, those used last.
_WAYS: Final = 32


def start(longest: float) -> "FetchProcess":
    """A new process. To be called in a thread that lives as long as the daemon, as the process ends with it. Raises
    OSError.

    longest: seconds after which it gives up a block.
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
    """Used on the event loop."""

    process: subprocess.Popen[bytes]
    channel: Channel[Batch, Report]
    # The requests that it sends.
    book: ChildBook
    # Has it said that it is ready?
    ready: bool = False
    # Is it not told anything any more? Was that since there was nothing to do?
    closed: bool = False
    retired: bool = False
    # Loop time at which it was started; since when it should have said something; and at which it was told of a block.
    started: float = 0.0
    heard: float = 0.0
    used: float = 0.0
    # Blocks that it has written, and their bytes.
    blocks: int = 0
    bytes: int = 0
    # What it is to bring, and where, by number.
    under_way: dict[int, tuple[Load, Room]] = field(default_factory=dict)
    _ways: OrderedDict[Way, int] = field(default_factory=OrderedDict)
    _next: int = 0

    def send(self, loads: Sequence[tuple[Load, Room]], segments: Sequence[OpenSegment], now: float) -> bool:
        """Tell it to bring blocks into their rooms, which are in these segments. False where it could not be told;
        then it writes nothing. now: in loop time."""
        places = {(segment.tier, segment.number): at for at, segment in enumerate(segments)}
        ways: list[NumberedWay] = []
        last, way = None, 0
        wanted: list[Wanted] = []
        for load, room in loads:
            order = load.order
            if order.way is not last:  # most are the same one, and to compare them takes 5 us
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
                self.heard = now  # who has nothing to do is silent
            self.under_way.update(zip((one.number for one in wanted), loads, strict=True))
        else:
            self._ways.clear()  # it has not heard of the new ones
        return told

    def answers(self) -> Iterator[tuple[Load, Room, Done | Failed]]:
        """What it has said since. Raises Closed."""
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
        """Do not wait for its end: one that hangs at a disk ends when that answers."""
        self.process.kill()

    def _name(self, way: Way) -> int:
        """The next number, from now on that of the *way*."""
        self._next += 1
        self._ways[way] = self._next
        if len(self._ways) > _WAYS:
            self._ways.popitem(last=False)
        return self._next
