"""Reading for several datasets of one URL, of which not all may."""

from typing import Any

import pytest

from cachefs.errors import CachefsError, ObjectChanged, OriginAccessDenied
from cachefs.messages import OriginOptions
from cachefs_daemon.datasets.any_origin import AnyOrigin, combine_origins
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings, PreconnectingOrigin, RangeOrigin
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3.prepared_get import PreparedGetOrigin
from tests import virtual_time

WANTED = ObjectRange(b"key", b"v", 1, 0, 1)


class Stub:
    """An origin that answers or fails as told. It follows Origin as far as reading."""

    url = "test://origin"

    def __init__(self, failure: CachefsError | None = None, *, passes: bool = False) -> None:
        self.failure = failure
        self.passes = passes  # the failure is over after a rest
        self.requests = self.errors = 0

    async def read(self, wanted: ObjectRange, patience: Deadline) -> bytes:
        self.requests += 1
        if self.failure is not None and self.passes:
            patience.last_error = self.failure
            await patience.pause(0)
        elif self.failure is not None:
            raise self.failure
        return b"x"


def read(*origins: Stub, times: int = 1) -> bytes:
    async def run() -> bytes:
        any_origin: Origin = AnyOrigin(origins)  # type: ignore[arg-type]
        for _ in range(times):
            data = await any_origin.read(WANTED, Deadline.after(10))
        return bytes(data)

    return virtual_time.run(run())


def test_the_next_one_is_asked_where_one_is_refused_and_first_from_then_on() -> None:
    refused, good = Stub(OriginAccessDenied("withdrawn")), Stub()
    assert read(refused, good, times=3) == b"x"
    assert (refused.requests, good.requests) == (1, 3)


def test_where_all_are_refused_the_first_reason_is_told() -> None:
    with pytest.raises(OriginAccessDenied, match="first"):
        read(Stub(OriginAccessDenied("first")), Stub(OriginAccessDenied("second")))


def test_what_others_could_not_help_is_told_at_once() -> None:
    other = Stub()
    with pytest.raises(ObjectChanged):
        read(Stub(ObjectChanged("changed")), other)
    assert other.requests == 0


def test_expired_credentials_are_waited_for_only_where_no_others_are_good() -> None:
    expired, refused, good = Stub(OriginAccessDenied("expired"), passes=True), Stub(OriginAccessDenied("no")), Stub()
    assert read(expired, refused, good) == b"x"
    assert (expired.requests, good.requests) == (1, 1)
    assert read(expired, refused) == b"x"
    assert expired.requests == 3


class AbleStub(Stub):
    """Can do what S3 can."""

    can_read_ranges = True

    async def read_parts(self, wanted: ObjectRange, lengths: Any, on_part: Any) -> None:
        on_part(0, b"x")

    async def preconnect(self) -> None:
        self.requests += 1

    def prepare_get(self, wanted: ObjectRange) -> Any:
        return self

    def note_success(self, wanted: ObjectRange, seconds: float) -> None:
        self.requests += 1

    def note_failure(self, reason: str, *, throttled: bool) -> None:
        self.errors += 1

    def count_hedges(self, sent: int, won: int) -> None:
        self.requests += sent


def test_buckets_with_other_options_still_read_ranges_take_orders_and_are_prepared() -> None:
    ways = [OriginOptions(endpoint_url="http://127.0.0.1:9", addressing_style=style) for style in ("path", "virtual")]
    both = combine_origins([open_origin("s3://bucket/data", way, OriginSettings()) for way in ways])
    assert isinstance(both, RangeOrigin)
    assert isinstance(both, PreconnectingOrigin)
    assert issubclass(type(both), PreparedGetOrigin)


def test_what_not_all_of_them_can_do_is_not_asked_of_any() -> None:
    both: object = combine_origins([AbleStub(), Stub()])  # type: ignore[list-item]
    assert not isinstance(both, RangeOrigin | PreconnectingOrigin)
    assert not issubclass(type(both), PreparedGetOrigin)


def test_the_one_that_may_read_takes_orders_and_reads_ranges() -> None:
    refused, good = AbleStub(OriginAccessDenied("withdrawn")), AbleStub()
    both: Any = combine_origins([refused, good])  # type: ignore[list-item]
    assert both.prepare_get(WANTED) is refused

    async def run() -> None:
        await both.read(WANTED, Deadline.after(10))
        await both.preconnect()
        await both.read_parts(WANTED, [1], lambda number, data: got.append(data))

    got: list[bytes] = []
    virtual_time.run(run())
    assert both.prepare_get(WANTED) is good
    both.note_success(WANTED, 0.1)
    both.count_hedges(2, 1)
    both.note_failure("slow", throttled=True)
    assert got == [b"x"]
    assert both.can_read_ranges
    assert (refused.requests, good.requests, good.errors) == (1, 5, 1)
