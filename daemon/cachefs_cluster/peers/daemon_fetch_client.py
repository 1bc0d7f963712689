"""The peer server's requests to the daemon for blocks: many threads share one connection of the fetch channel."""

import itertools
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final

from cachefs import errors
from cachefs.errors import Busy, CachefsError, DaemonUnavailable
from cachefs.fetch_frames import (
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
from cachefs.messages import FetchedBlock, FetchRequest

# The outcome of a block: its number in the peer's request, and the daemon's response.
FetchOutcome = tuple[int, FetchedBlock | CachefsError]
# Queue of a connection's outcomes. None: the connection sends the heartbeats from now on (see `heartbeats`).
FetchOutcomes = queue.SimpleQueue[FetchOutcome | None]
# Seconds that the daemon may leave requests unread. Its loop reads them as they arrive.
_SEND_SECONDS: Final = 10.0
_RECEIVE_BYTES: Final = 256 << 10

_hello, _answered = body_decoder(Hello), body_decoder(FetchResponseFrame)


class DaemonFetchClient:
    """Sends fetch requests to the daemon and hands out their outcomes. Thread-safe."""

    def __init__(self, link: socket.socket, on_end: Callable[[], None]) -> None:
        """on_end: called in another thread when the daemon has ended."""
        self._message_listeners: list[Callable[[], None]] = []
        self._link = link
        self._on_end = on_end
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[int, FetchOutcomes]] = {}
        self._link.sendall(encode_frame(Hello(version=VERSION)))
        threading.Thread(target=self._receive, name="fetched", daemon=True).start()

    def add_message_listener(self, listener: Callable[[], None]) -> None:
        """Call *listener* in another thread on each message of the daemon, from now on."""
        self._message_listeners.append(listener)

    def request_block(self, index: int, fetch: FetchRequest, outcomes: FetchOutcomes) -> int:
        """Have the daemon fetch the block of *fetch*, and put *index* and the outcome into *outcomes* once. Return the
        number for `forget_request`."""
        number = next(self._numbers)
        self._waiting[number] = index, outcomes
        try:
            with self._sending:
                self._link.sendall(encode_frame(FetchRequestFrame(number=number, request=fetch)))
        except OSError as error:
            self._put_outcome(number, DaemonUnavailable(f"the node's daemon does not answer: {error}"))
        return number

    def forget_request(self, number: int) -> None:
        """Drop the outcome of a request."""
        self._waiting.pop(number, None)

    def _receive(self) -> None:
        frames, room, greeted = FrameSplitter(MAX_RESPONSE_BYTES), memoryview(bytearray(_RECEIVE_BYTES)), False
        try:
            while (count := self._link.recv_into(room)) > 0:
                for listener in self._message_listeners:
                    listener()
                for body in frames.split_frames(room[:count]):
                    if greeted:
                        self._handle_response(_answered(bytes(body)))
                    elif (hello := _hello(body)).refusal:
                        raise InvalidFrame(hello.refusal)
                    greeted = True
        except (OSError, InvalidFrame):
            pass
        self._on_end()

    def _handle_response(self, response: FetchResponseFrame) -> None:
        if response.kind:
            kind = getattr(errors, response.kind, CachefsError)
            self._put_outcome(response.number, (Busy if kind is Busy else CachefsError)(response.message))
        else:
            for block in response.blocks[:1]:
                self._put_outcome(response.number, block)

    def _put_outcome(self, number: int, outcome: FetchedBlock | CachefsError) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting[1].put((waiting[0], outcome))
