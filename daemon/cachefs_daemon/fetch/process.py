"""The daemon's side of one fetch process (see cachefs_daemon.fetch_process): start, commands, reports, end; and a block
on its way through one."""

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.block import BlockLocation
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch_process.channel import ChannelClosed, FetchProcessChannel
from cachefs_daemon.fetch_process.frames import (
    BlockFailed,
    BlockWritten,
    CommandBatch,
    FetchCommand,
    FetchReport,
    NumberedGetParameters,
    SegmentToWrite,
)
from cachefs_daemon.origin.request_counters import ChildCounterSet
from cachefs_daemon.origin.s3.prepared_get import GetParameters, PreparedGet, PreparedGetOrigin
from cachefs_daemon.store.space_reservations import ReservedSpace, WritableSegment

# Called with the location of the block; or, at most once and before that, with None: fetch it in another way too. The
# process may still deliver it.
ProcessResultCallback = Callable[[BlockLocation | None], None]

# Ways that are remembered. The process itself remembers a few more, the most recently used.
_MAX_KNOWN_PARAMETERS: Final = 32


@dataclass(slots=True, eq=False)
class ProcessFetch:
    """A block to be fetched by a fetch process."""

    source: BlockSource
    origin: PreparedGetOrigin
    prepared_get: PreparedGet
    on_result: ProcessResultCallback
    # Called when the bytes have arrived.
    on_arrival: Callable[[], None]
    # Loop time of the request.
    started_at: float
    # Whether the block should be fetched in another way by now.
    is_given_up: bool = False

    def give_up(self) -> None:
        """Ask for the block to be fetched in another way."""
        if not self.is_given_up:
            self.is_given_up = True
            self.on_result(None)


def start_fetch_process(longest: float) -> "FetchProcess":
    """Start a new process. Call in a thread that lives as long as the daemon, as the process ends with that thread.
    Raises OSError.

    longest: seconds after which the process gives up a block.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        book = ChildCounterSet()
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
    return FetchProcess(process, FetchProcessChannel[CommandBatch, FetchReport](ours, FetchReport), book)


@dataclass(slots=True, eq=False)
class FetchProcess:
    """A running fetch process, and the blocks that it is fetching. Used on the event loop."""

    process: subprocess.Popen[bytes]
    channel: FetchProcessChannel[CommandBatch, FetchReport]
    # Counts the requests that the process sends.
    request_counters: ChildCounterSet
    # Whether the process has sent a first report.
    is_ready: bool = False
    # Whether the channel is closed; and whether that was because the process was idle.
    is_closed: bool = False
    is_retired: bool = False
    # Loop times: of the start; since when the process has been silent; and of the last command.
    started_at: float = 0.0
    last_report_at: float = 0.0
    last_batch_at: float = 0.0
    # Blocks written so far, and their bytes.
    blocks: int = 0
    bytes: int = 0
    # Blocks in progress, with their rooms, by number.
    in_progress: dict[int, tuple[ProcessFetch, ReservedSpace]] = field(default_factory=dict)
    _known_parameters: OrderedDict[GetParameters, int] = field(default_factory=OrderedDict)
    _last_number: int = 0

    def send_batch(
        self,
        process_fetches: Sequence[tuple[ProcessFetch, ReservedSpace]],
        segments: Sequence[WritableSegment],
        now: float,
    ) -> bool:
        """Send a batch of blocks to fetch into their rooms, which lie in these segments. Returns False if it could not
        be sent; the process then writes nothing. now: loop time."""
        segment_indices = {(segment.tier, segment.number): at for at, segment in enumerate(segments)}
        new_parameters: list[NumberedGetParameters] = []
        last, number = None, 0
        commands: list[FetchCommand] = []
        for process_fetch, room in process_fetches:
            order = process_fetch.prepared_get
            if order.parameters is not last:  # most are the same object, and a comparison takes 5 us
                last = order.parameters
                if last not in self._known_parameters:
                    new_parameters.append(NumberedGetParameters(self._number_of(last), last))
                number = self._known_parameters[last]
            self._last_number += 1
            at = segment_indices[room.tier, room.segment]
            commands.append(
                FetchCommand(self._last_number, number, order.key, order.etag, room.length, room.key, at, room.start)
            )
        files = [SegmentToWrite(segment.number, segment.allocate) for segment in segments]
        try:
            is_sent = self.channel.send(
                CommandBatch(new_parameters, files, commands), [segment.descriptor for segment in segments]
            )
        except ChannelClosed:
            is_sent = False
        if is_sent:
            self.last_batch_at = now
            if not self.in_progress:
                self.last_report_at = now  # an idle process is rightly silent
            self.in_progress.update(zip((command.number for command in commands), process_fetches, strict=True))
        else:
            self._known_parameters.clear()  # the process has not received the new ones
        return is_sent

    def receive_results(self) -> Iterator[tuple[ProcessFetch, ReservedSpace, BlockWritten | BlockFailed]]:
        """Yield all results received since the last call. Raises ChannelClosed."""
        while (message := self.channel.receive()) is not None:
            report, _ = message
            self.is_ready = True
            results: list[BlockWritten | BlockFailed] = [*report.done, *report.failed]
            for result in results:
                known = self.in_progress.pop(result.number, None)
                if known is None:
                    raise ChannelClosed
                yield *known, result

    def kill(self) -> None:
        """Kill the process without waiting for its end: a process that hangs at a disk ends when the disk responds."""
        self.process.kill()

    def _number_of(self, parameters: GetParameters) -> int:
        self._last_number += 1
        self._known_parameters[parameters] = self._last_number
        if len(self._known_parameters) > _MAX_KNOWN_PARAMETERS:
            self._known_parameters.popitem(last=False)
        return self._last_number
