"""A running S3 server, whatever makes it run, and how to fill it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

_PARALLEL = 32


@dataclass(frozen=True)
class S3Server:
    """endpoint: its URL. Every method talks to the real server and raises what botocore raises."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the standard AWS credentials chain, and nothing of this machine's own configuration."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, bucket: str) -> None:
        self._run(lambda client: client.create_bucket(Bucket=bucket))

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Put many objects, concurrently."""
        self._each(objects.items(), lambda client, item: client.put_object(Bucket=bucket, Key=item[0], Body=item[1]))

    def delete(self, bucket: str, keys: Iterable[str]) -> None:
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
            async with get_session().create_client(
                "s3",
                endpoint_url=self.endpoint,
                region_name=self.region,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                config=config,
            ) as client:
                await work(client)

        asyncio.run(connected())
