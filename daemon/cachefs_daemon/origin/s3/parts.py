"""Passes on the parts of a response while it is received."""

from collections.abc import Callable, Sequence

from cachefs.errors import CachefsError
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.http.connection import InFlightRequest
from cachefs_daemon.origin.http.head import Head
from cachefs_daemon.origin.s3.response import S3Target, bytes_before


class PartsRequest(InFlightRequest):
    """A request for a range of an object, divided into parts."""

    __slots__ = ("_ends", "_is_right", "_next_part", "_on_part", "_target", "_wanted")

    def __init__(
        self, target: S3Target, wanted: ObjectRange, lengths: Sequence[int], arrived: Callable[[int, memoryview], None]
    ) -> None:
        """lengths: of the parts. arrived: called with the number and the bytes of each."""
        super().__init__()
        self._target = target
        self._wanted = wanted
        self._ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self._on_part = arrived
        self._next_part = 0  # the first part that was not passed on
        self._is_right: bool | None = None  # whether the head fits; None before it arrived

    def on_received(self, head: Head, body: memoryview) -> None:
        """Pass on the parts that *body*, the bytes so far, completes."""
        if self._is_right is None:
            self._is_right = self._has_right_bytes(head)
        if self._is_right:
            self._pass_parts(body)

    def pass_all_parts(self, body: memoryview) -> None:
        """Pass on all parts of the whole, verified *body*."""
        self._is_right = True
        self._pass_parts(body)

    def _pass_parts(self, body: memoryview) -> None:
        while self._next_part < len(self._ends) and len(body) >= self._ends[self._next_part]:
            begin = self._ends[self._next_part - 1] if self._next_part else 0
            self._on_part(self._next_part, body[begin : self._ends[self._next_part]])
            self._next_part += 1
            self.passed_bytes = self._ends[self._next_part - 1]

    def _has_right_bytes(self, head: Head) -> bool:
        """Return whether the head belongs to the listed version. If not, the caller finds out why."""
        if head.status not in (200, 206) or head.length != self._wanted.length:
            return False
        etag, span = head.headers.get(b"etag", b""), head.headers.get(b"content-range", b"")
        try:
            before = bytes_before(
                self._wanted, self._target, etag.decode("latin-1"), head.length, span.decode("latin-1")
            )
        except CachefsError:
            return False
        return before == 0
