"""The daemon's end of the fetch channel (cachefs.fetch_frames): answers mounts that wait for blocks.

A gRPC call takes 1.2 ms, of which the daemon computes 0.6 ms; a frame on a separate socket takes a tenth of that.
Requests for present blocks are answered in the same turn of the loop, and others as soon as their fetch ends.

Clients are not trusted. So each user's resources are bounded: connections, blocks that are waited for, bytes of a
frame, responses that are not read. A client that exceeds a bound loses the connection, or gets an error at once.
"""

import asyncio
import itertools
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from cachefs.block import PIECE_SIZE
from cachefs.errors import Busy, CachefsError, ConfigError, StoreFull
from cachefs.fetch_frames import (
    HELLO_SECONDS,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    VERSION,
    FetchRequestFrame,
    FetchResponseFrame,
    FrameSplitter,
    Hello,
    InvalidFrame,
    body_decoder,
    encode_frame,
)  # fmt: skip
from cachefs.messages import BlockRef, FetchedBlock, Message
from cachefs_daemon.api.identity import CallerRights, peer_credentials
from cachefs_daemon.api.socket_path import ACCEPT_BACKLOG, BACKLOG, SocketPath
from cachefs_daemon.fetch.block_fetch import BlockResult, BypassBlock
from cachefs_daemon.fetch.concurrency_limiter import REQUESTER
from cachefs_daemon.fetch.fetcher import MAX_EARLY_BYTES, Fetcher, FetchForPeer, PeerOutcome
from cachefs_daemon.runtime.error_log import ErrorLog

# Bounds of one user, which may be one mount: connections (a mount has one for each worker, 64 at most), and blocks that
# are waited for. Of one connection: a worker asks for 4,096 blocks at most, and for some ahead of readers. A block
# takes 5 KB while it is waited for.
MAX_CONNECTIONS: Final = 512
MAX_USER_BLOCKS: Final = 32_768
MAX_CONNECTION_BLOCKS: Final = 8192
# Bytes of unread responses, of one connection and of all connections of a user; and the seconds within which a client
# must read more of them.
MAX_UNREAD: Final = 64 << 20
MAX_USER_UNREAD: Final = 512 << 20
SLOW_SECONDS: Final = 30.0
# Longest wait for a block, in seconds.
MAX_DEADLINE: Final = 86_400.0
# Blocks that a connection may wait for while responses may contain bytes: 4 MiB of them. A connection that waits for
# more reads them in the tiers.
_MAX_EARLY: Final = 16
# Bytes of responses that a socket buffers (Linux counts twice as many): a block in one piece.
_SEND_BUFFER: Final = MAX_EARLY_BYTES
# Bytes of requests that are read in one turn of the loop: 150 requests, which take 5 ms.
_RECEIVE_BYTES: Final = 16 << 10

# The "user" of the connections of the daemon's peer servers.
_PEERS_UID: Final = -1

_decode_hello, _decode_request = body_decoder(Hello), body_decoder(FetchRequestFrame)
# Numbers of connections, by which fetches alternate between callers. A mount has several connections.
_numbers: Final = itertools.count(1)


@dataclass(slots=True)
class _User:
    uid: int
    connections: int = 0
    # Blocks that were requested and not answered yet, including those of connections that have ended.
    blocks: int = 0
    # Connections that read slower than they are answered.
    slow_connections: set["_Connection"] = field(default_factory=set)

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses that wait for the slow connections."""
        return sum(connection.unread_bytes for connection in self.slow_connections)

    def reserve_blocks(self, blocks: int) -> None:
        """Count *blocks* more. Raises Busy."""
        if self.blocks + blocks > MAX_USER_BLOCKS:
            raise Busy(f"user {self.uid} waits for {self.blocks} blocks already; is an origin hanging?")
        self.blocks += blocks


class FetchChannelServer:
    """Listens for mounts and peer servers. Used on the event loop."""

    def __init__(self, path: Path, admission: CallerRights, fetcher: Fetcher, errors: ErrorLog) -> None:
        """path: of the socket. errors: receives protocol errors of clients."""
        self.path = path
        self.socket_path = SocketPath(path)
        self.fetcher = fetcher
        self.receive_buffer = memoryview(
            bytearray(_RECEIVE_BYTES)
        )  # the buffer in which each connection reads, one after the other
        self._admission = admission
        self._errors = errors
        self._users: dict[int, _User] = {}  # by uid: users with connections or blocks
        self._connections: set[_Connection] = set()
        self._hints: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._all_closed = asyncio.Event()

    async def start(self) -> None:
        """Listen, also where the socket was removed. Raises Busy where another daemon listens, or CachefsError."""
        listening = self.socket_path.listen()
        former, loop = self._server, asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listening, backlog=ACCEPT_BACKLOG)
        listening.listen(BACKLOG)
        if former is not None:
            former.close()

    async def adopt_connection(self, link: socket.socket, fetch_for_peer: FetchForPeer) -> None:
        """Serve one end of a socket pair, whose other end a peer server of this daemon has."""
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _Connection(self, fetch_for_peer), link)

    async def stop(self, grace: float) -> None:
        """Take no more requests, and answer those in progress within *grace* seconds."""
        self.socket_path.remove()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.end_after_responses()
        try:
            async with asyncio.timeout(grace):
                while self._connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()

    # --- for connections ----------------------------------------------------------------------------------------

    def add_connection(self, connection: "_Connection", client: socket.socket) -> _User:
        """Register a new connection, and return its user. Raises CachefsError where it is refused."""
        self._connections.add(connection)
        if connection.fetch_for_peer is not None:
            user = self._users.setdefault(_PEERS_UID, _User(_PEERS_UID))
            user.connections += 1
            return user
        try:
            uid, groups = peer_credentials(client)
        except (OSError, KeyError) as error:
            raise CachefsError(f"the daemon cannot identify the caller: {error}") from None
        self._admission.require_mount_right(self._admission.caller_of(uid, groups))
        user = self._users.get(uid) or _User(uid)
        if user.connections >= MAX_CONNECTIONS:
            raise Busy(f"user {uid} has {MAX_CONNECTIONS} connections to {self.path} already; unmount some mounts")
        self._users[uid] = user
        user.connections += 1
        return user

    def remove_connection(self, connection: "_Connection", user: _User | None) -> None:
        """Unregister a connection that has ended."""
        self._connections.discard(connection)
        if user is not None:
            user.slow_connections.discard(connection)
            user.connections -= 1
            self.forget_if_idle(user)
        if not self._connections:
            self._all_closed.set()

    def forget_if_idle(self, user: _User) -> None:
        if not user.connections and not user.blocks:
            self._users.pop(user.uid, None)

    def log_error(self, user: _User | None, text: str, bug: BaseException | None = None) -> None:
        who = "a user" if user is None else f"user {user.uid}" if user.uid != _PEERS_UID else "peers"
        self._errors.add(f"{self.path}, {who}", text, bug=bug)

    def fetch_ahead(self, connection: "_Connection", request: FetchRequestFrame) -> None:
        """Fetch blocks that no reader waits for."""

        async def run() -> None:
            outcomes: list[BlockResult] | CachefsError = []
            try:
                await self.fetcher.start_hinted_fetches(request.request.blocks)
            except Exception as error:
                outcomes = connection.log_bug(error)
            connection.send_outcomes(request, outcomes)

        task = asyncio.create_task(run())
        self._hints.add(task)
        task.add_done_callback(self._hints.discard)


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, channel: FetchChannelServer, fetch_for_peer: FetchForPeer | None = None) -> None:
        """fetch_for_peer: serves the requests if a peer server of this daemon is at the other end."""
        self.fetch_for_peer = fetch_for_peer
        self._channel = channel
        self._transport: Any = None  # asyncio.Transport, once it is connected
        self._user: _User | None = None  # None: the client is refused
        self._number = next(_numbers)
        self._frames = FrameSplitter(MAX_REQUEST_BYTES)
        self._blocks = 0  # requested on this connection and not answered yet
        self._has_greeted = False
        self._is_ending = False  # no more requests are taken
        self._pending_frames: list[bytearray] | None = None  # responses that are sent at the end of this turn
        # Ends the connection: first where no Hello arrives, later where the client does not read.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses that wait for the client."""
        size: int = self._transport.get_write_buffer_size()
        return size

    # --- callbacks of asyncio -------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        try:
            self._user = self._channel.add_connection(self, transport.get_extra_info("socket"))
        except CachefsError as error:
            self._is_ending = True
            self._write(Hello(version=VERSION, kind=type(error).__name__, refusal=_line(error)))
            transport.close()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._write(Hello(version=VERSION))
        self._hang_up_after(HELLO_SECONDS, "")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._channel.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_ending:
            return
        self._pending_frames = []
        try:
            for body in self._frames.split_frames(self._channel.receive_buffer[:nbytes]):
                self._handle_frame(body)
        except InvalidFrame as error:
            self._hang_up(f"a client sent an invalid request: {error}")
        except Exception as error:
            self._hang_up(f"internal error ({error!r})", bug=error)
        finally:
            gathered, self._pending_frames = self._pending_frames, None
            if gathered and not self._is_ending:
                self._transport.write(b"".join(gathered))

    def eof_received(self) -> None:
        """The connection then closes, and `connection_lost` follows."""

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its responses."""
        if self._user is not None:
            self._user.slow_connections.add(self)
        self._transport.pause_reading()
        self._hang_up_after(SLOW_SECONDS, f"a client has not read its answers for {SLOW_SECONDS:.0f} s")

    def resume_writing(self) -> None:
        if self._user is not None:
            self._user.slow_connections.discard(self)
        self._stop_timer()
        if not self._is_ending:
            self._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._is_ending = True
        self._stop_timer()
        self._channel.remove_connection(self, self._user)

    # --- requests -------------------------------------------------------------------------------------------------

    def _handle_frame(self, body: bytes | memoryview) -> None:
        """Process a frame. Raises InvalidFrame."""
        if self._is_ending:
            return
        if self._has_greeted:
            self._serve_request(_decode_request(body))
            return
        hello = _decode_hello(body)
        if hello.version != VERSION:
            # The client has received our Hello, knows the error, and reports it to its reader.
            self._hang_up(
                f"a mount speaks version {hello.version} of the fetch channel and this daemon version {VERSION}: "
                "unmount and mount again with the daemon's version of cachefs"
            )
            return
        self._has_greeted = True
        self._stop_timer()

    def _serve_request(self, request: FetchRequestFrame) -> None:
        fetch = request.request
        try:
            self._reserve_blocks(fetch.blocks)
        except CachefsError as error:
            self._send_response(request.number, error)
            return
        if not fetch.blocks:
            self.send_outcomes(request, [])
            return
        if fetch.ahead:
            self._channel.fetch_ahead(self, request)
            return
        # The client's timer runs as long as the deadline: answer a little earlier, so that the client learns the
        # reason.
        seconds = min(max(0.0, fetch.deadline), MAX_DEADLINE)
        REQUESTER.set(self._number)
        try:
            if self.fetch_for_peer is not None:
                self.fetch_for_peer(fetch, seconds - min(1.0, seconds / 20), partial(self.send_outcomes, request))
                return
            self._channel.fetcher.request_on_demand(
                fetch.blocks, seconds - min(1.0, seconds / 20), partial(self.send_outcomes, request),
                may_be_early=self._blocks <= _MAX_EARLY,
            )  # fmt: skip
        except Exception as error:
            self.send_outcomes(request, self.log_bug(error))

    def _reserve_blocks(self, blocks: list[BlockRef]) -> None:
        """Count the blocks of a request. Raises Busy, ConfigError."""
        assert self._user is not None
        if sum(max(0, ref.size) + 2 * PIECE_SIZE for ref in blocks if ref.size) > MAX_RESPONSE_BYTES // 2:
            raise ConfigError(f"the bytes of {len(blocks)} blocks are more than one response can hold")
        if self._blocks + len(blocks) > MAX_CONNECTION_BLOCKS:
            raise Busy(f"a mount's worker waits for {self._blocks} blocks already; is an origin hanging?")
        self._user.reserve_blocks(len(blocks))
        self._blocks += len(blocks)

    def send_outcomes(
        self, request: FetchRequestFrame, outcomes: Sequence[PeerOutcome] | CachefsError, source: str = ""
    ) -> None:
        """Send the result of a request. source: the source of a block that has just been fetched."""
        user, blocks = self._user, request.request.blocks
        assert user is not None
        self._blocks -= len(blocks)
        user.blocks -= len(blocks)
        if self._transport.is_closing():
            self._channel.forget_if_idle(user)
            return
        if isinstance(outcomes, CachefsError):
            self._send_response(request.number, outcomes)
        else:
            fetched = [_fetched_block(ref, one, source) for ref, one in zip(blocks, outcomes, strict=False)]
            self._send_response(request.number, None, fetched)
        if self._is_ending:
            self._close_if_idle()

    def _send_response(self, number: int, error: CachefsError | None, fetched: Iterable[FetchedBlock] = ()) -> None:
        if error is not None:
            self._write(FetchResponseFrame(number=number, blocks=[], kind=type(error).__name__, message=_line(error)))
            return
        try:
            self._write(FetchResponseFrame(number=number, blocks=list(fetched)))
        except (ValueError, OverflowError) as bug:
            self._send_response(number, self.log_bug(bug))

    def _write(self, message: Message) -> None:
        unread = self.unread_bytes
        if unread > MAX_UNREAD:
            self._hang_up(f"a client does not read its answers: {MAX_UNREAD >> 20} MiB of them wait")
        elif unread and self._user is not None and self._user.unread_bytes > MAX_USER_UNREAD:
            self._hang_up(f"clients do not read their answers: {MAX_USER_UNREAD >> 20} MiB of them wait")
        elif self._pending_frames is not None:
            self._pending_frames.append(encode_frame(message))
        else:
            self._transport.write(encode_frame(message))

    # --- end ------------------------------------------------------------------------------------------------------

    def log_bug(self, error: Exception) -> CachefsError:
        """Log an internal error, and return the error for the client."""
        self._channel.log_error(self._user, f"internal error ({error!r})", bug=error)
        return CachefsError(f"internal error ({error!r}); see the daemon's log")

    def end_after_responses(self) -> None:
        """Take no more requests."""
        self._is_ending = True
        self._transport.pause_reading()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._blocks:
            self._transport.close()

    def abort(self) -> None:
        self._is_ending = True
        self._transport.abort()

    def _hang_up(self, text: str, bug: BaseException | None = None) -> None:
        if text:
            self._channel.log_error(self._user, text, bug)
        self.abort()

    def _hang_up_after(self, seconds: float, text: str) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._hang_up, text)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _fetched_block(ref: BlockRef, outcome: PeerOutcome, source: str) -> FetchedBlock:
    if isinstance(outcome, FetchedBlock):
        return outcome
    if isinstance(outcome, BypassBlock) and ref.size <= 0:
        outcome = StoreFull("no tier can hold the block, and the client accepts no bytes; see `cachectl status`")
    if isinstance(outcome, BypassBlock):
        data = outcome.pieces(ref.start, ref.size)
        return FetchedBlock(location=b"", data=data, checksums=outcome.checksums, source=source)
    if isinstance(outcome, CachefsError):
        return FetchedBlock(location=b"", errno=outcome.errno, message=str(outcome))
    return FetchedBlock(location=outcome.pack(), source=source)


def _line(error: CachefsError) -> str:
    return " ".join(str(error).split())[:2000].encode("utf-8", "backslashreplace").decode()
