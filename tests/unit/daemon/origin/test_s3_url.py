"""Which bucket and prefix an s3:// URL names, and which options belong to it."""

import contextlib

import pytest

from cachefs.errors import ConfigError, NotFound
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.key_ranges import KeyRange, ListingCheckpoint
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3.origin import S3Origin
from cachefs_daemon.origin.s3.page import ListingPage
from tests import virtual_time

POINT = "arn:aws:s3:us-east-1:123456789012:accesspoint"


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/p/q/", "b", "p/q/"),
        (f"s3://{POINT}/point", f"{POINT}/point", ""),
        (f"s3://{POINT}/point/p/q", f"{POINT}/point", "p/q/"),
        (f"s3://{POINT}:point/p", f"{POINT}:point", "p/"),
        (
            "s3://arn:aws-cn:s3-outposts:r:1:outpost/op-1/accesspoint/point/p",
            "arn:aws-cn:s3-outposts:r:1:outpost/op-1/accesspoint/point",
            "p/",
        ),
        ("s3://arn:aws:s3::1:accesspoint/alias.mrap/p", "arn:aws:s3::1:accesspoint/alias.mrap", "p/"),
        ("s3://point-abc-s3alias/p", "point-abc-s3alias", "p/"),
    ],
)
def test_bucket_and_prefix(url: str, bucket: str, prefix: str) -> None:
    async def scene() -> None:
        origin = open_origin(url, OriginOptions(), OriginSettings())
        try:
            assert origin.identity(b"key").decode() == f"s3:aws:{bucket}/{prefix}key"
            assert origin.url == url.rstrip("/")
        finally:
            await origin.close()

    virtual_time.run(scene())


@pytest.mark.parametrize(
    ("place", "is_refused"), [(ListingCheckpoint(), True), (ListingCheckpoint([KeyRange(b"z", None)]), False)]
)
def test_only_a_listing_from_its_start_is_told_that_the_url_is_an_object(
    place: ListingCheckpoint, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket has an object `p` beside the directory `p/`, of which no key is left."""

    async def page(self: S3Origin, **query: object) -> ListingPage:
        return ListingPage([ListedObject(b"", 1, 0, b"e")] if query["Prefix"] == "p" else [], None)

    async def scene() -> None:
        origin = S3Origin("s3://b/p", OriginOptions(), OriginSettings())
        try:
            async for batch in origin.list_from(lambda key, reason: None, place):
                assert batch == []
        finally:
            await origin.close()

    monkeypatch.setattr(S3Origin, "_fetch_page", page)
    with pytest.raises(NotFound, match="is an object") if is_refused else contextlib.nullcontext():
        virtual_time.run(scene())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (OriginOptions(user_project="p"), "--requester-pays"),
        (OriginOptions(requester_pays=True, anonymous=True), "leave out --anonymous"),
    ],
)
def test_who_pays_is_said_as_s3_wants_it(options: OriginOptions, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_origin("s3://b", options, OriginSettings())
