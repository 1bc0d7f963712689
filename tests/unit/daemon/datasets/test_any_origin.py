"""Reading for several datasets of one URL, of which not all may."""

import asyncio

import pytest
from cachefs_daemon.datasets.any_origin import AnyOrigin
from cachefs_daemon.origin.base import ObjectRange, Origin
from cachefs_daemon.origin.patience import Patience

from cachefs.errors import CachefsError, ObjectChanged, OriginAccessDenied

WANTED = ObjectRange(b"key", b"v", 1, 0, 1)


class Stub:
    """An origin that answers or fails as told. It follows Origin as far as reading."""

    url = "test://origin"

    def __init__(self, failure: CachefsError | None = None, *, passes: bool = False) -> None:
        self.failure = failure
        self.passes = passes  # the failure is over after a rest
        self.requests = self.errors = 0

    async def read(self, wanted: ObjectRange, patience: Patience) -> bytes:
        self.requests += 1
        if self.failure is not None and self.passes:
            patience.trouble = self.failure
            await patience.rest(0)
        elif self.failure is not None:
            raise self.failure
        return b"x"


def read(*origins: Stub, times: int = 1) -> bytes:
    async def run() -> bytes:
        any_origin: Origin = AnyOrigin(origins)  # type: ignore[arg-type]
        for _ in range(times):
            data = await any_origin.read(WANTED, Patience.of(10))
        return bytes(data)

    return asyncio.run(run())


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
