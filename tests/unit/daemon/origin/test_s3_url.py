"""Which bucket and prefix an s3:// URL names, and which options belong to it."""

import asyncio

import pytest
from cachefs_daemon.origin.base import OriginSettings, open_origin

from cachefs.errors import ConfigError
from cachefs.messages import OriginOptions

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

    asyncio.run(scene())


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
