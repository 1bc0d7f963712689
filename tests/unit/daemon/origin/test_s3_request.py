"""Our requests beside those of botocore: the same URL, and the same signature for the same headers."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.origin.s3 import route as s3_route
from cachefs_daemon.origin.s3.request import RequestMaker
from cachefs_daemon.origin.s3.route import NoRoute, S3Route, find_route, register_capture

KEYS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40),
    st.lists(st.sampled_from(["..", ".", "", "a", "?b=c", "#d", "%2F", "é", "~", "+", " ", "&x=", "=", "*", "\\"]))
    .map("/".join)
    .filter(bool),
)
TOKENS = st.text("abcXYZ019+/=", max_size=60)
# Bucket, endpoint, style, region that the client has.
WAYS = [
    ("my-bucket", None, "auto", "eu-west-1"),
    ("my-bucket", None, "path", "us-east-1"),
    ("my.bucket", None, "auto", "us-east-1"),
    ("arn:aws:s3:us-west-2:123456789012:accesspoint/point", None, "auto", "us-east-1"),
    ("my-bucket", "http://127.0.0.1:9000", "path", "us-east-1"),
    ("my-bucket", "http://[::1]:9000/below", "path", "us-east-1"),
    ("my-bucket", "https://store.example:443", "virtual", "here"),
]


class Botocore:
    """A client of aiobotocore that sends nothing."""

    def __init__(self, endpoint: str | None, style: str, region: str, signature: Any = None) -> None:
        self._loop = asyncio.new_event_loop()
        # As in s3_connection.py.
        config = AioConfig(
            s3={"addressing_style": style}, signature_version=signature,
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
        )  # fmt: skip
        made = AioSession().create_client(
            "s3", region_name=region, endpoint_url=endpoint, config=config,
            aws_access_key_id="access/key", aws_secret_access_key="secret",
        )  # fmt: skip
        self.client = self.run(made.__aenter__())
        register_capture(self.client)

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.client.close())
        self._loop.close()

    def url(self, bucket: str, key: str) -> str:
        """Of the GET that it would send."""
        with patch.object(s3_route, "_KEY", key), patch.object(s3_route, "_route", lambda _, request: request):
            return str(self.run(find_route(self.client, bucket)).url)


@contextmanager
def botocore_for(*way: Any) -> Iterator[Botocore]:
    found = Botocore(*way)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way[0][:9]} {way[1]} {way[2]}")
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Botocore, str, S3Route]]:
    bucket, *options = request.param
    with botocore_for(*options) as botocore:
        yield botocore, bucket, botocore.run(find_route(botocore.client, bucket))


@given(key=KEYS)
def test_keys_are_sent_as_botocore_sends_them(way: tuple[Botocore, str, S3Route], key: str) -> None:
    botocore, bucket, route = way
    ours = f"http{'s' if route.server.tls else ''}://{route.host}{route.path(key)}"
    assert ours == botocore.url(bucket, key).replace("example:443/", "example/")


@given(
    key=KEYS,
    token=TOKENS,
    offset=st.integers(0, 5),
    etag=st.text("abc019-_!()", max_size=40),
    payer=st.sampled_from(["", "requester"]),
)
def test_signatures_are_those_of_botocore(
    way: tuple[Botocore, str, S3Route], key: str, token: str, offset: int, etag: str, payer: str
) -> None:
    route = replace(way[2], payer=payer)
    credentials = ReadOnlyCredentials("access/key", "sécret", token or None)
    wanted = ObjectRange(key.encode(), etag.encode(), 10, offset, 10 - offset)
    start, headers = parse(RequestMaker(route, credentials).make_get(key, etag, wanted))
    assert start == f"GET {route.path(key)} HTTP/1.1"
    assert headers["if-match"] == f'"{etag}"'
    assert headers.get("x-amz-request-payer", "") == payer
    assert headers.get("range") == (f"bytes={offset}-9" if offset else None)
    ours = headers.pop("authorization")
    unsigned = {name: value for name, value in headers.items() if name not in ("host", "accept-encoding")}
    url = f"http{'s' if route.server.tls else ''}://{route.host}{route.path(key)}"
    theirs = AWSRequest(method="GET", url=url, headers=unsigned)
    theirs.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(credentials, route.service, route.region)
    then = patch("botocore.auth.get_current_datetime", lambda: _Then(headers["x-amz-date"]))
    with patch.object(signer, "_modify_request_before_signing"), then:
        signer.add_auth(theirs)
    assert ours == theirs.headers["Authorization"]


class _Then:
    """A time that is written as it was."""

    def __init__(self, text: str) -> None:
        self._text = text

    def strftime(self, form: str) -> str:
        return self._text


def parse(request: bytes) -> tuple[str, dict[str, str]]:
    text, _, body = request.decode().partition("\r\n\r\n")
    assert body == ""
    start, *lines = text.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines)
    return start, headers


def test_an_anonymous_request_is_not_signed() -> None:
    with botocore_for("http://127.0.0.1:1", "path", "us-east-1", UNSIGNED) as botocore:
        route = botocore.run(find_route(botocore.client, "bucket"))
    start, headers = parse(RequestMaker(route, None).make_get("key", "e", ObjectRange(b"key", b"e", 5, 0, 5)))
    assert start == "GET /bucket/key HTTP/1.1"
    assert set(headers) == {"host", "if-match", "x-amz-checksum-mode", "user-agent", "accept-encoding"}


def test_the_time_is_now() -> None:
    with botocore_for(None, "auto", "us-east-1") as botocore:
        route = botocore.run(find_route(botocore.client, "bucket"))
    maker = RequestMaker(route, ReadOnlyCredentials("a", "b", None))
    _, headers = parse(maker.make_get("key", "e", ObjectRange(b"key", b"e", 5, 0, 5)))
    assert abs(time.mktime(time.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")) - time.mktime(time.gmtime())) < 60


@pytest.mark.parametrize(
    ("variables", "signature", "reason"),
    [({"https_proxy": "http://127.0.0.1:3128"}, None, "a proxy"), ({}, "s3", "another way")],
)
def test_what_is_left_to_aiobotocore(
    variables: dict[str, str], signature: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with botocore_for(None, "auto", "us-east-1", signature) as botocore, pytest.raises(NoRoute, match=reason):
        botocore.run(find_route(botocore.client, "bucket"))
