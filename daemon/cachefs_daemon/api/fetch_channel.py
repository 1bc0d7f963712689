"""The daemon's end of the fetch channel (cachefs.fetch_frames): answers mounts that wait for blocks.

gRPC takes 1.2 ms for a call, of which the daemon computes 0.6 ms; a frame on a socket of one's own takes a tenth of
that. What is known at once is answered in the same turn of the loop, and what is fetched as soon as its flight lands.

Whoever connects may be anybody. So what one user can have here is bounded: connections, blocks that are waited for,
bytes of a frame, answers that are not read. Who does not keep to that loses the connection, or gets an error at once.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from cachefs.block import PIECE_SIZE
from cachefs.errors import Busy, CachefsError, ConfigError, StoreFull
from cachefs.fetch_frames import (
    HELLO_SECONDS,
    MOST_ANSWERED,
    MOST_ASKED,
    VERSION,
    Answered,
    Asked,
    BadFrame,
    Frames,
    Hello,
    decoder,
    frame,
)  # fmt: skip
from cachefs.messages import BlockRef, Fetch, FetchedBlock, Message
from cachefs_daemon.api.identity import Admission, peer
from cachefs_daemon.api.socket_place import AT_ONCE, BACKLOG, SocketPlace
from cachefs_daemon.fetch.fetcher import MOST_EARLY, Fetcher
from cachefs_daemon.fetch.flights import Answer
from cachefs_daemon.fetch.passing import PassingBlock
from cachefs_daemon.fetch.slots import ASKER
from cachefs_daemon.peers.answers import LacksSnapshot, NotHere, TakeIt
from cachefs_daemon.runtime.errorlog import ErrorLog

# Of one user, and a mount is one too: connections (a mount has one for each worker, 64 at most), and blocks that are
# waited for. Of one connection: a worker asks for 4,096 blocks at most, and for some ahead of readers. A block takes
# 5 KB while it is waited for.
MOST_CONNECTIONS: Final = 512
MOST_BLOCKS: Final = 32_768
MOST_BLOCKS_HERE: Final = 8192
# Bytes of answers that wait to be read, by one connection and by all of a user; and how long one may take no more of
# them.
MOST_UNREAD: Final = 64 << 20
MOST_UNREAD_OF_USER: Final = 512 << 20
SLOW_SECONDS: Final = 30.0
# Seconds that one may wait for a block, at most.
MOST_PATIENCE: Final = 86_400.0
# Blocks that a connection may wait for whose answers may be bytes: 4 MiB of them. One that waits for more reads them in
# the tiers.
_MOST_EARLY: Final = 16
# Bytes of answers that a socket takes (Linux counts twice as many): a block in one piece.
_SEND_ROOM: Final = MOST_EARLY
# Bytes of questions that are read in one turn of the loop: 150 of them, which take 5 ms.
_AT_ONCE: Final = 16 << 10

# What a question of a peer is answered with.
PeerOutcome = Answer | TakeIt | NotHere | LacksSnapshot
# The "user" whose connections are those of the daemon's peer servers.
_PEERS: Final = -1

_hello, _asked = decoder(Hello), decoder(Asked)
# Connections: who waits for blocks. A mount has several, and they take turns with those of others.
_numbers: Final = itertools.count(1)


@dataclass(slots=True)
class _User:
    """What one user has here."""

    uid: int
    connections: int = 0
    # Blocks that were asked for and not answered yet, also by connections that have ended.
    blocks: int = 0
    # Connections that do not read as fast as they are answered.
    slow: set["_Connection"] = field(default_factory=set)

    @property
    def unread(self) -> int:
        """Bytes of answers that wait for these."""
        return sum(connection.unread for connection in self.slow)

    def take(self, blocks: int) -> None:
        """Raises Busy."""
        if self.blocks + blocks > MOST_BLOCKS:
            raise Busy(f"user {self.uid} waits for {self.blocks} blocks already; is an origin hanging?")
        self.blocks += blocks


class FetchChannel:
    """Used on the event loop."""

    def __init__(self, path: Path, admission: Admission, fetcher: Fetcher, errors: ErrorLog) -> None:
        """path: of the socket. errors: is told of clients that make no sense."""
        self.path = path
        self.place = SocketPlace(path)
        self.fetcher = fetcher
        # Brings the blocks for which a peer asks, with its patience in seconds, and passes on what has come of them. It
        # must have no other peer bring them.
        self.ask_for_peer: Callable[[Fetch, float, Callable[[Sequence[PeerOutcome]], None]], None] = self._ask_for_peer
        self.room = memoryview(bytearray(_AT_ONCE))  # in which each connection reads, one after the other
        self._admission = admission
        self._errors = errors
        self._users: dict[int, _User] = {}  # by uid: those who have anything
        self._connections: set[_Connection] = set()
        self._hints: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._all_closed = asyncio.Event()

    async def start(self) -> None:
        """Listen, also where the socket was removed. Raises Busy where another daemon listens, or CachefsError."""
        listening = self.place.listen()
        former, loop = self._server, asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listening, backlog=AT_ONCE)
        listening.listen(BACKLOG)
        if former is not None:
            former.close()

    async def adopt(self, link: socket.socket) -> None:
        """Serve one end of a socket pair, whose other end a peer server of this daemon has."""
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _Connection(self, for_peers=True), link)

    def _ask_for_peer(self, fetch: Fetch, patience: float, answer: Callable[[Sequence[PeerOutcome]], None]) -> None:
        self.fetcher.ask_for_peer(fetch, patience, answer)

    async def stop(self, grace: float) -> None:
        """Take no more questions, and answer those in progress within *grace* seconds."""
        self.place.leave()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.end_when_answered()
        try:
            async with asyncio.timeout(grace):
                while self._connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()

    # --- for connections ----------------------------------------------------------------------------------------

    def enter(self, connection: "_Connection", client: socket.socket) -> _User:
        """A connection was made. Who that is; raises CachefsError where it may not be."""
        self._connections.add(connection)
        if connection.for_peers:
            user = self._users.setdefault(_PEERS, _User(_PEERS))
            user.connections += 1
            return user
        try:
            uid, groups = peer(client)
        except (OSError, KeyError) as error:
            raise CachefsError(f"the daemon cannot tell who calls: {error}") from None
        self._admission.check_mounts(self._admission.caller(uid, groups))
        user = self._users.get(uid) or _User(uid)
        if user.connections >= MOST_CONNECTIONS:
            raise Busy(f"user {uid} has {MOST_CONNECTIONS} connections to {self.path} already; unmount some mounts")
        self._users[uid] = user
        user.connections += 1
        return user

    def leave(self, connection: "_Connection", user: _User | None) -> None:
        """It has ended."""
        self._connections.discard(connection)
        if user is not None:
            user.slow.discard(connection)
            user.connections -= 1
            self.forget_if_idle(user)
        if not self._connections:
            self._all_closed.set()

    def forget_if_idle(self, user: _User) -> None:
        if not user.connections and not user.blocks:
            self._users.pop(user.uid, None)

    def complain(self, user: _User | None, text: str, bug: BaseException | None = None) -> None:
        who = "somebody" if user is None else f"user {user.uid}" if user.uid != _PEERS else "peers"
        self._errors.add(f"{self.path}, {who}", text, bug=bug)

    def hint(self, connection: "_Connection", asked: Asked) -> None:
        """Blocks that nobody waits for."""

        async def run() -> None:
            answer: list[Answer] | CachefsError = []
            try:
                await self.fetcher.hint(asked.fetch.blocks)
            except Exception as error:
                answer = connection.bug(error)
            connection.answer(asked, answer)

        task = asyncio.create_task(run())
        self._hints.add(task)
        task.add_done_callback(self._hints.discard)


class _Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, channel: FetchChannel, *, for_peers: bool = False) -> None:
        """for_peers: a peer server of this daemon is at the other end."""
        self.for_peers = for_peers
        self._channel = channel
        self._transport: Any = None  # asyncio.Transport, once it is made
        self._user: _User | None = None  # None: it is refused
        self._number = next(_numbers)
        self._frames = Frames(MOST_ASKED)
        self._blocks = 0  # asked for here and not answered yet
        self._greeted = False
        self._ending = False  # no more questions are taken
        self._gathered: list[bytearray] | None = None  # answers that are sent at the end of this turn
        # Ends the connection: at first where no Hello comes, later where the client does not read.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unread(self) -> int:
        """Bytes of answers that wait for the client."""
        size: int = self._transport.get_write_buffer_size()
        return size

    # --- what asyncio calls ---------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        try:
            self._user = self._channel.enter(self, transport.get_extra_info("socket"))
        except CachefsError as error:
            self._ending = True
            self._write(Hello(version=VERSION, kind=type(error).__name__, refusal=_line(error)))
            transport.close()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_ROOM)
        self._write(Hello(version=VERSION))
        self._end_after(HELLO_SECONDS, "")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._channel.room

    def buffer_updated(self, nbytes: int) -> None:
        if self._ending:
            return
        self._gathered = []
        try:
            for body in self._frames.feed(self._channel.room[:nbytes]):
                self._take(body)
        except BadFrame as error:
            self._hang_up(f"a client has sent what is no question: {error}")
        except Exception as error:
            self._hang_up(f"internal error ({error!r})", bug=error)
        finally:
            gathered, self._gathered = self._gathered, None
            if gathered and not self._ending:
                self._transport.write(b"".join(gathered))

    def eof_received(self) -> None:
        """The client has gone."""

    def pause_writing(self) -> None:
        """The client does not read: nothing more is read from it either."""
        if self._user is not None:
            self._user.slow.add(self)
        self._transport.pause_reading()
        self._end_after(SLOW_SECONDS, f"a client has not read its answers for {SLOW_SECONDS:.0f} s")

    def resume_writing(self) -> None:
        if self._user is not None:
            self._user.slow.discard(self)
        self._stop_timer()
        if not self._ending:
            self._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._ending = True
        self._stop_timer()
        self._channel.leave(self, self._user)

    # --- questions ------------------------------------------------------------------------------------------------

    def _take(self, body: bytes | memoryview) -> None:
        """Raises BadFrame."""
        if self._ending:
            return
        if self._greeted:
            self._serve(_asked(body))
            return
        hello = _hello(body)
        if hello.version != VERSION:
            # It has had our Hello and knows what is wrong; it says so to its reader.
            self._hang_up(
                f"a mount speaks version {hello.version} of the fetch channel and this daemon version {VERSION}: "
                "unmount and mount again with the daemon's version of cachefs"
            )
            return
        self._greeted = True
        self._stop_timer()

    def _serve(self, asked: Asked) -> None:
        fetch = asked.fetch
        try:
            self._admit(fetch.blocks)
        except CachefsError as error:
            self._send(asked.number, error)
            return
        if not fetch.blocks:
            self.answer(asked, [])
            return
        if fetch.ahead:
            self._channel.hint(self, asked)
            return
        # The client's own timer runs as long as the deadline: answer a little before, so that it learns the reason.
        seconds = min(max(0.0, fetch.deadline), MOST_PATIENCE)
        ASKER.set(self._number)
        try:
            if self.for_peers:
                self._channel.ask_for_peer(fetch, seconds - min(1.0, seconds / 20), partial(self.answer, asked))
                return
            self._channel.fetcher.ask(
                fetch.blocks, seconds - min(1.0, seconds / 20), partial(self.answer, asked),
                early=self._blocks <= _MOST_EARLY,
            )  # fmt: skip
        except Exception as error:
            self.answer(asked, self.bug(error))

    def _admit(self, blocks: list[BlockRef]) -> None:
        """Raises Busy, ConfigError."""
        assert self._user is not None
        if sum(max(0, ref.size) + 2 * PIECE_SIZE for ref in blocks if ref.size) > MOST_ANSWERED // 2:
            raise ConfigError(f"the bytes of {len(blocks)} blocks are more than one answer can have")
        if self._blocks + len(blocks) > MOST_BLOCKS_HERE:
            raise Busy(f"a mount's worker waits for {self._blocks} blocks already; is an origin hanging?")
        self._user.take(len(blocks))
        self._blocks += len(blocks)

    def answer(self, asked: Asked, answers: Sequence[PeerOutcome] | CachefsError, source: str = "") -> None:
        """What has come of a question. source: what brought the block, where it has just come."""
        user, blocks = self._user, asked.fetch.blocks
        assert user is not None
        self._blocks -= len(blocks)
        user.blocks -= len(blocks)
        if self._transport.is_closing():
            self._channel.forget_if_idle(user)
            return
        if isinstance(answers, CachefsError):
            self._send(asked.number, answers)
        else:
            fetched = [_fetched(ref, one, source) for ref, one in zip(blocks, answers, strict=False)]
            self._send(asked.number, None, fetched)
        if self._ending:
            self._close_if_answered()

    def _send(self, number: int, error: CachefsError | None, fetched: Iterable[FetchedBlock] = ()) -> None:
        if error is not None:
            self._write(Answered(number=number, blocks=[], kind=type(error).__name__, message=_line(error)))
            return
        try:
            self._write(Answered(number=number, blocks=list(fetched)))
        except (ValueError, OverflowError) as bug:
            self._send(number, self.bug(bug))

    def _write(self, message: Message) -> None:
        unread = self.unread
        if unread > MOST_UNREAD:
            self._hang_up(f"a client does not read its answers: {MOST_UNREAD >> 20} MiB of them wait")
        elif unread and self._user is not None and self._user.unread > MOST_UNREAD_OF_USER:
            self._hang_up(f"clients do not read their answers: {MOST_UNREAD_OF_USER >> 20} MiB of them wait")
        elif self._gathered is not None:
            self._gathered.append(frame(message))
        else:
            self._transport.write(frame(message))

    # --- the end --------------------------------------------------------------------------------------------------

    def bug(self, error: Exception) -> CachefsError:
        """For the client, where there is a bug in the daemon."""
        self._channel.complain(self._user, f"internal error ({error!r})", bug=error)
        return CachefsError(f"internal error ({error!r}); see the daemon's log")

    def end_when_answered(self) -> None:
        """Take no more questions."""
        self._ending = True
        self._transport.pause_reading()
        self._close_if_answered()

    def _close_if_answered(self) -> None:
        if not self._blocks:
            self._transport.close()

    def abort(self) -> None:
        self._ending = True
        self._transport.abort()

    def _hang_up(self, text: str, bug: BaseException | None = None) -> None:
        if text:
            self._channel.complain(self._user, text, bug)
        self.abort()

    def _end_after(self, seconds: float, text: str) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._hang_up, text)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _fetched(ref: BlockRef, answer: PeerOutcome, source: str) -> FetchedBlock:
    if isinstance(answer, TakeIt):
        return FetchedBlock(location=b"", take_it=True)
    if isinstance(answer, NotHere):
        return FetchedBlock(location=b"", not_here=True)
    if isinstance(answer, LacksSnapshot):
        return FetchedBlock(location=b"", lacks_snapshot=True)
    if isinstance(answer, PassingBlock) and ref.size <= 0:
        answer = StoreFull("no tier can hold the block, and who asks takes no bytes; see `cachectl status`")
    if isinstance(answer, PassingBlock):
        data = answer.pieces(ref.start, ref.size)
        return FetchedBlock(location=b"", data=data, checksums=answer.checksums, source=source)
    if isinstance(answer, CachefsError):
        return FetchedBlock(location=b"", errno=answer.errno, message=str(answer))
    return FetchedBlock(location=answer.pack(), source=source)


def _line(error: CachefsError) -> str:
    return " ".join(str(error).split())[:2000].encode("utf-8", "backslashreplace").decode()
