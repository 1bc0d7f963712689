"""A running S3 server of any kind, and how to fill it."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import botocore.loaders
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

_PARALLEL = 32


@functools.cache
def _loader() -> botocore.loaders.Loader:
    """Return the description of the S3 protocol, which takes 0.1 s to load."""
    return botocore.loaders.create_loader()


@dataclass(frozen=True)
class S3Server:
    """A running server. Every method talks to it, and raises what botocore raises."""

    endpoint: str  # its URL
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with the credentials. They hide this machine's own AWS configuration."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket."""
        self._run(lambda client: client.create_bucket(Bucket=bucket))

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Put many objects at the same time. *objects* maps keys to contents."""
        self._each(objects.items(), lambda client, item: client.put_object(Bucket=bucket, Key=item[0], Body=item[1]))

    def delete(self, bucket: str, keys: Iterable[str]) -> None:
        """Delete many objects at the same time."""
        self._each(keys, lambda client, key: client.delete_object(Bucket=bucket, Key=key))

    def _each(self, items: Iterable[Any], call: Callable[[Any, Any], Awaitable[Any]]) -> None:
        async def all_of(client: Any) -> None:
            rest = iter(items)

            async def worker() -> None:
                for item in rest:
                    await call(client, item)

            await asyncio.gather(*(worker() for _ in range(_PARALLEL)))

        self._run(all_of)

    def _run(self, work: Callable[[Any], Awaitable[Any]]) -> None:
        async def connected() -> None:
            config = AioConfig(
                s3={"addressing_style": "path"},
                max_pool_connections=_PARALLEL,
                # rclone never answers a request for a key with most control characters.
                read_timeout=20,
                retries={"total_max_attempts": 3},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
            session = AioSession()
            session.register_component("data_loader", _loader())
            async with session.create_client(
                "s3",
                verify=False,  # there is no TLS, and authorities take 0.02 s to load
                endpoint_url=self.endpoint,
                region_name=self.region,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                config=config,
            ) as client:
                await work(client)

        asyncio.run(connected())
