"""The S3 server behind the proxy, filled with the dataset: rclone's server, or a running one."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from cachefs.errors import CachefsError, ConfigError
from cachefs_bench.lab.scratch_node import SCRATCH_CREDENTIALS, S3Credentials, run_s3_server
from cachefs_bench.sample_data import write_samples
from cachefs_bench.scenario import DatasetShape

BUCKET: Final = "cachefs-bench"
PARALLEL: Final = 32


@dataclass(frozen=True, slots=True)
class OriginServer:
    """An S3 server with a bucket that holds the dataset."""

    endpoint: str  # its URL
    credentials: S3Credentials
    bucket: str = BUCKET


@contextmanager
def run_filled_server(
    work: Path, shape: DatasetShape, endpoint: str | None, bucket: str | None = None
) -> Iterator[OriginServer]:
    """Run a server with the dataset in it.

    *endpoint* is the URL of a running server, in which a bucket is created, and removed at the end; None starts a new
    server. *bucket*: an empty bucket of the running server to use instead, which is emptied at the end.
    """
    account = SCRATCH_CREDENTIALS if endpoint is None else environment_credentials()
    directory = work / "buckets" / BUCKET
    write_samples(directory, shape.files, shape.size)
    if endpoint is None:
        with run_s3_server(directory.parent, work / "s3.log") as own:
            yield OriginServer(own, account)
        return
    server = OriginServer(endpoint, account, bucket or BUCKET)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    keys = [str(path.relative_to(directory)) for path in files]
    if bucket is None:
        _run_with_client(server, lambda client: client.create_bucket(Bucket=BUCKET))
    else:
        _run_with_client(server, lambda client: _require_empty(client, bucket))
    try:
        _run_with_client(server, lambda client: _upload(client, server.bucket, keys, files))
        yield server
    finally:
        _run_with_client(server, lambda client: _delete(client, server.bucket, keys))
        if bucket is None:
            _run_with_client(server, lambda client: client.delete_bucket(Bucket=BUCKET))


def environment_credentials() -> S3Credentials:
    """Return the credentials of a running server. Raises ConfigError."""
    try:
        return S3Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    except KeyError:
        names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise ConfigError(f"set {names} to the credentials of the S3 server at --endpoint") from None


async def _require_empty(client: Any, bucket: str) -> None:
    """Raise ConfigError for a bucket with objects, which could be overwritten."""
    found = await client.list_objects_v2(Bucket=bucket, MaxKeys=1)
    if found.get("KeyCount") or found.get("Contents"):
        raise ConfigError(f"bucket {bucket} is not empty; give an empty one, whose objects may be made and removed")


async def _upload(client: Any, bucket: str, keys: Sequence[str], files: Sequence[Path]) -> None:
    remaining = iter(zip(keys, files, strict=True))

    async def worker() -> None:
        for key, file in remaining:
            await client.put_object(Bucket=bucket, Key=key, Body=file.read_bytes())

    await asyncio.gather(*(worker() for _ in range(PARALLEL)))


async def _delete(client: Any, bucket: str, keys: Sequence[str]) -> None:
    remaining = iter(keys)

    async def worker() -> None:
        for key in remaining:
            await client.delete_object(Bucket=bucket, Key=key)

    await asyncio.gather(*(worker() for _ in range(PARALLEL)))


def _run_with_client(server: OriginServer, work: Any) -> None:
    """Await *work*(client) with a client of the server. Raises CachefsError if the server fails."""

    async def connected() -> None:
        config = AioConfig(
            s3={"addressing_style": "path"}, max_pool_connections=PARALLEL, connect_timeout=5, read_timeout=20,
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
        )  # fmt: skip
        async with get_session().create_client(
            "s3", endpoint_url=server.endpoint, region_name="us-east-1",
            aws_access_key_id=server.credentials.access_key, aws_secret_access_key=server.credentials.secret_key,
            config=config,
        ) as client:  # fmt: skip
            await work(client)

    try:
        asyncio.run(connected())
    except (BotoCoreError, ClientError) as error:
        raise CachefsError(f"the S3 server at {server.endpoint} cannot be filled: {error}") from None
