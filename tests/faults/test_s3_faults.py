"""Broken answers of an S3 server: every read gives the right bytes, or an error that says what is wrong."""

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cachefs.errors import CachefsError, ObjectChanged, OriginAccessDenied, OriginError, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin import retry
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, RangeOrigin
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.s3 import S3Server

CONTENT = bytes(range(256)) * 1200
WHOLE = (0, len(CONTENT))
PART = (1000, 50_000)


@pytest.fixture(scope="module")
def listed(radosgw: S3Server) -> ListedObject:
    radosgw.create_bucket("faults")
    radosgw.put("faults", {"data/object": CONTENT})
    with pytest.MonkeyPatch.context() as patch, faulty.running(radosgw.endpoint) as proxy:
        for name, value in radosgw.environment.items():
            patch.setenv(name, value)
        (found,) = list_through(proxy)
    return found


@pytest.fixture
def proxy(radosgw: S3Server, listed: ListedObject, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "_FIRST", 0.001)
    with faulty.running(radosgw.endpoint) as running:
        yield running


def list_through(proxy: FaultyProxy) -> list[ListedObject]:
    async def once() -> list[ListedObject]:
        origin = open_origin("s3://faults/data", OriginOptions(endpoint_url=proxy.endpoint), OriginSettings())
        try:
            return [found async for batch in origin.list(lambda key, reason: None) for found in batch]
        finally:
            await origin.close()

    return asyncio.run(once())


def read(
    proxy: FaultyProxy, listed: ListedObject, span: tuple[int, int], deadline: float = 60, read_timeout: float = 20
) -> bytes:
    async def once() -> bytes:
        settings = OriginSettings(read_timeout=read_timeout)
        origin = open_origin("s3://faults/data", OriginOptions(endpoint_url=proxy.endpoint), settings)
        try:
            data = await origin.read(
                ObjectRange(listed.key, listed.version, listed.size, *span), Deadline.after(deadline)
            )
            assert origin.errors == origin.requests - 1
            return bytes(data)
        finally:
            await origin.close()

    return asyncio.run(once())


TRANSIENT = {
    "truncated": Fault(truncate=10_000, times=2),
    "truncated at once": Fault(truncate=0, times=2),
    "dropped": Fault(drop=True, times=2),
    "reset": Fault(drop=True, reset=True, times=2),
    "reset in the middle": Fault(truncate=10_000, reset=True, times=2),
    "slow down": Fault(status=503, times=3),
    "too many requests": Fault(status=429, times=2),
    "internal error": Fault(status=500),
    "bad gateway": Fault(status=502),
}


HARMLESS = {
    "interim": Fault(before=b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
    "chunked": Fault(chunked=True),
    "in pieces": Fault(pace=0.001),
}


@pytest.mark.parametrize("span", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize("name", HARMLESS)
def test_odd_answers_are_understood(proxy: FaultyProxy, listed: ListedObject, name: str, span: tuple[int, int]) -> None:
    proxy.add(replace(HARMLESS[name], times=None))
    # aiobotocore reads what is in chunks: one request more, which counts as an error.
    assert read(proxy, listed, span) == CONTENT[span[0] : sum(span)]


@pytest.mark.parametrize("span", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize("name", TRANSIENT)
def test_transient_faults_are_overcome(
    proxy: FaultyProxy, listed: ListedObject, name: str, span: tuple[int, int]
) -> None:
    fault = replace(TRANSIENT[name])
    proxy.add(fault)
    assert read(proxy, listed, span) == CONTENT[span[0] : sum(span)]
    assert fault.times == 0
    assert proxy.count(path="object") == 1 + (TRANSIENT[name].times or 0)


PERMANENT = [
    (Fault(headers={"ETag": '"other"'}, times=None), ObjectChanged),
    (Fault(status=412, times=None), ObjectChanged),
    (Fault(status=404, times=None), ObjectChanged),
    (Fault(status=403, times=None), OriginAccessDenied),
    # The version is right: to list it again does not help.
    (Fault(extra=b"more", times=None), OriginError),
    (Fault(headers={"Content-Length": "100"}, truncate=100, times=None), OriginError),
    (Fault(headers={"ETag": f'W/"{hashlib.md5(CONTENT).hexdigest()}"'}, times=None), OriginError),
]
# They might pass, and are waited for.
LASTING = [Fault(truncate=100, times=None), Fault(drop=True, times=None), Fault(status=503, times=None)]


@pytest.mark.parametrize("span", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize(("fault", "error"), PERMANENT)
def test_what_is_final_is_named_at_once(
    proxy: FaultyProxy, listed: ListedObject, fault: Fault, error: type[CachefsError], span: tuple[int, int]
) -> None:
    proxy.add(fault)
    with pytest.raises(error, match="s3://faults/data/object") as raised:
        read(proxy, listed, span)
    assert "\n" not in str(raised.value)
    assert raised.type is error
    assert ("refresh the dataset" in str(raised.value)) == (error is ObjectChanged)
    assert proxy.count(path="object") == 1


@pytest.mark.parametrize("span", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize("fault", LASTING)
def test_what_might_pass_is_tried_until_the_deadline_and_named(
    proxy: FaultyProxy, listed: ListedObject, fault: Fault, span: tuple[int, int]
) -> None:
    proxy.add(fault)
    for deadline in (0.7, 10):  # a busy machine tries less often
        with pytest.raises(OriginUnavailable, match="s3://faults/data/object") as raised:
            read(proxy, listed, span, deadline=deadline)
        assert "\n" not in str(raised.value)
        if proxy.count(path="object") > 3:
            return
    raise AssertionError("it is not tried again and again")


@pytest.mark.parametrize(
    "content_range", ["bytes 0-49999/307200", "bytes 1000-50999/307201", "bytes 1000-50998/307200", "nonsense"]
)
def test_another_range_than_asked_for_is_refused(proxy: FaultyProxy, listed: ListedObject, content_range: str) -> None:
    proxy.add(Fault(headers={"Content-Range": content_range}))
    with pytest.raises(OriginError, match=r"1000-50999 of 307200.*a proxy may"):
        read(proxy, listed, PART)


def test_of_a_whole_object_in_place_of_a_range_only_the_range_is_used(proxy: FaultyProxy, listed: ListedObject) -> None:
    proxy.add(Fault(replace=CONTENT, times=None))
    assert read(proxy, listed, PART) == CONTENT[1000:51_000]


def test_a_silent_server_is_asked_again(proxy: FaultyProxy, listed: ListedObject) -> None:
    proxy.add(Fault(delay=60))
    assert read(proxy, listed, WHOLE, read_timeout=2) == CONTENT
    assert proxy.count(path="object") >= 2


def test_the_deadline_bounds_all_attempts(proxy: FaultyProxy, listed: ListedObject) -> None:
    proxy.add(Fault(delay=30, times=None))
    with pytest.raises(OriginUnavailable, match="s3://faults/data/object"):
        read(proxy, listed, WHOLE, deadline=1)


def test_a_listing_overcomes_transient_faults(proxy: FaultyProxy, listed: ListedObject) -> None:
    proxy.add(Fault(status=503, path="list-type=2", times=2), Fault(truncate=100, path="list-type=2"))
    assert list_through(proxy) == [listed]
    assert proxy.count(path="list-type=2") == 4


LENGTHS = [100_000, 60_000, 1, 50_000]


def read_parts(proxy: FaultyProxy, listed: ListedObject) -> tuple[dict[int, bytes], CachefsError | None, int]:
    """Parts that came, why not all did, and how many requests were refused for good reason."""

    async def once() -> tuple[dict[int, bytes], CachefsError | None, int]:
        origin = open_origin("s3://faults/data", OriginOptions(endpoint_url=proxy.endpoint), OriginSettings())
        assert isinstance(origin, RangeOrigin)
        came: dict[int, bytes] = {}
        failure = None
        wanted = ObjectRange(listed.key, listed.version, listed.size, 1000, sum(LENGTHS))
        try:
            await origin.read_parts(wanted, LENGTHS, lambda number, data: came.setdefault(number, bytes(data)) and None)
        except CachefsError as error:
            failure = error
        finally:
            await origin.close()
        return came, failure, origin.endpoint.throttled

    return asyncio.run(once())


def parts_of(content: bytes) -> dict[int, bytes]:
    ends = [1000 + sum(LENGTHS[:number]) for number in range(len(LENGTHS) + 1)]
    return {number: content[ends[number] : ends[number + 1]] for number in range(len(LENGTHS))}


def test_parts_of_a_range_come_with_one_request(proxy: FaultyProxy, listed: ListedObject) -> None:
    assert read_parts(proxy, listed) == (parts_of(CONTENT), None, 0)
    assert proxy.count(path="object") == 1


def test_parts_that_came_before_a_range_is_cut_are_right(proxy: FaultyProxy, listed: ListedObject) -> None:
    proxy.add(Fault(truncate=160_500))
    came, failure, _ = read_parts(proxy, listed)
    assert isinstance(failure, OriginUnavailable)
    # Whether the last bytes before the cut were received in time, nobody knows.
    assert set(came) <= {0, 1, 2}
    assert came.items() <= parts_of(CONTENT).items()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(headers={"ETag": '"other"'}),
        Fault(headers={"Content-Range": "bytes 0-210000/307200"}),
        Fault(replace=CONTENT),
        Fault(extra=b"surplus"),
        Fault(status=503, headers={"Retry-After": "1"}),
    ],
    ids=["changed", "shifted", "whole", "longer", "throttled"],
)
def test_no_part_of_a_wrong_answer_is_taken(proxy: FaultyProxy, listed: ListedObject, fault: Fault) -> None:
    proxy.add(replace(fault))
    came, failure, _ = read_parts(proxy, listed)
    assert isinstance(failure, CachefsError)
    assert came == {}
