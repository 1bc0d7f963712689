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
    MOST_ANSWERED,
    VERSION,
    Answered,
    Asked,
    BadFrame,
    Frames,
    Hello,
    decoder,
    frame,
)  # fmt: skip
from cachefs.messages import Fetch, FetchedBlock

# The outcome of a block: its number in the peer's request, and the daemon's response.
Came = tuple[int, FetchedBlock | CachefsError]
# Queue of a connection's outcomes. None: the connection sends the heartbeats from now on (see `signs`).
Coming = queue.SimpleQueue[Came | None]
# Seconds that the daemon may leave requests unread. Its loop reads them as they arrive.
_SEND_SECONDS: Final = 10.0
_AT_ONCE: Final = 256 << 10

_hello, _answered = decoder(Hello), decoder(Answered)


class DaemonFetches:
    """Sends fetch requests to the daemon and hands out their outcomes. Thread-safe."""

    def __init__(self, link: socket.socket, ended: Callable[[], None]) -> None:
        """ended: called in another thread when the daemon has ended."""
        self.on_answer: Callable[[], None] = _ignored  # called on each message of the daemon
        self._link = link
        self._ended = ended
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[int, Coming]] = {}
        self._link.sendall(frame(Hello(version=VERSION)))
        threading.Thread(target=self._receive, name="fetched", daemon=True).start()

    def ask(self, index: int, fetch: Fetch, came: Coming) -> int:
        """Have the daemon fetch the block of *fetch*, and put *index* and the outcome into *came* once. Return the
        number for `forget`."""
        number = next(self._numbers)
        self._waiting[number] = index, came
        try:
            with self._sending:
                self._link.sendall(frame(Asked(number=number, fetch=fetch)))
        except OSError as error:
            self._put(number, DaemonUnavailable(f"the node's daemon does not answer: {error}"))
        return number

    def forget(self, number: int) -> None:
        """Drop the outcome of a request."""
        self._waiting.pop(number, None)

    def _receive(self) -> None:
        frames, room, greeted = Frames(MOST_ANSWERED), memoryview(bytearray(_AT_ONCE)), False
        try:
            while (count := self._link.recv_into(room)) > 0:
                self.on_answer()
                for body in frames.feed(room[:count]):
                    if greeted:
                        self._take(_answered(bytes(body)))
                    elif (hello := _hello(body)).refusal:
                        raise BadFrame(hello.refusal)
                    greeted = True
        except (OSError, BadFrame):
            pass
        self._ended()

    def _take(self, answered: Answered) -> None:
        if answered.kind:
            kind = getattr(errors, answered.kind, CachefsError)
            self._put(answered.number, (Busy if kind is Busy else CachefsError)(answered.message))
        else:
            for block in answered.blocks[:1]:
                self._put(answered.number, block)

    def _put(self, number: int, outcome: FetchedBlock | CachefsError) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting[1].put((waiting[0], outcome))


def _ignored() -> None: ...
