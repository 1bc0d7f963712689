"""Passes on the parts of a response while it is received."""

from collections.abc import Callable, Sequence

from cachefs.errors import CachefsError
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.http_connection import Asked
from cachefs_daemon.origin.http_head import Head
from cachefs_daemon.origin.s3_answer import Place, bytes_before


class Parts(Asked):
    """A request for a range of an object, divided into parts."""

    __slots__ = ("_arrived", "_ends", "_is_right", "_next", "_place", "_wanted")

    def __init__(
        self, place: Place, wanted: ObjectRange, lengths: Sequence[int], arrived: Callable[[int, memoryview], None]
    ) -> None:
        """lengths: of the parts. arrived: called with the number and the bytes of each."""
        super().__init__()
        self._place = place
        self._wanted = wanted
        self._ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self._arrived = arrived
        self._next = 0  # the first part that was not passed on
        self._is_right: bool | None = None  # whether the head fits; None before it arrived

    def receive(self, head: Head, body: memoryview) -> None:
        """Pass on the parts that *body*, the bytes so far, completes."""
        if self._is_right is None:
            self._is_right = self._has_right_bytes(head)
        if self._is_right:
            self._hand_on(body)

    def finish(self, body: memoryview) -> None:
        """Pass on all parts of the whole, verified *body*."""
        self._is_right = True
        self._hand_on(body)

    def _hand_on(self, body: memoryview) -> None:
        while self._next < len(self._ends) and len(body) >= self._ends[self._next]:
            begin = self._ends[self._next - 1] if self._next else 0
            self._arrived(self._next, body[begin : self._ends[self._next]])
            self._next += 1
            self.handed = self._ends[self._next - 1]

    def _has_right_bytes(self, head: Head) -> bool:
        """Return whether the head belongs to the listed version. If not, the caller finds out why."""
        if head.status not in (200, 206) or head.length != self._wanted.length:
            return False
        said, span = head.headers.get(b"etag", b""), head.headers.get(b"content-range", b"")
        try:
            before = bytes_before(
                self._wanted, self._place, said.decode("latin-1"), head.length, span.decode("latin-1")
            )
        except CachefsError:
            return False
        return before == 0
