"""Stores that are asked over HTTP, with small servers: filled, opened as origins, listed and read."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from tests.servers.stores import HubServer, StoreServer

SETTINGS = OriginSettings(connect_timeout=20, read_timeout=20)

Result = TypeVar("Result")


class Kind:
    """A store with objects, and how to open it as an origin."""

    def __init__(self, name: str, servers: dict[str, StoreServer]) -> None:
        self.name = name
        self.server = servers[name]

    def fill(self, objects: dict[str, bytes]) -> None:
        """Replace everything by these objects."""
        self.server.objects.clear()
        if isinstance(self.server, HubServer):
            self.server.commit(objects)
            return
        for key, data in objects.items():
            self.server.put(f"set/{key}", data)
        if self.name == "http":
            self.server.put("set/index.jsonl", index_of(self.server, objects))

    def replace(self, key: str, data: bytes) -> None:
        """Upload another object with this key."""
        self.server.put(f"set/{key}", data)

    def url(self, endpoint: str) -> str:
        urls = {"gs": "gs://set", "az": "az://set", "hf": "hf://datasets/team/set", "http": f"{endpoint}/set/"}
        return urls[self.name]

    def open(self, endpoint: str = "", **options: object) -> Origin:
        endpoint = endpoint or self.server.endpoint
        of_server = f"{endpoint}/someaccount" if self.name == "az" else endpoint
        values = {"endpoint_url": of_server, "anonymous": self.name == "gs", **options}
        return open_origin(self.url(endpoint), OriginOptions(**values), SETTINGS)  # type: ignore[arg-type]


def index_of(server: StoreServer, objects: dict[str, bytes]) -> bytes:
    lines = [
        {"path": key, "size": len(data), "etag": f'"another {server.versions[f"set/{key}"]}"'}
        | {"sha256": hashlib.sha256(data).hexdigest()}
        for key, data in objects.items()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def with_origin(origin: Origin, work: Callable[[Origin], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        try:
            return await work(origin)
        finally:
            await origin.close()

    return asyncio.run(run())


async def listing(origin: Origin) -> dict[str, ListedObject]:
    def fail(key: bytes, reason: str) -> None:
        pytest.fail(f"{key!r} {reason}")

    return {found.key.decode(): found async for batch in origin.list(fail) for found in batch}


def part_of(listed: ListedObject, offset: int, length: int) -> ObjectRange:
    return ObjectRange(listed.key, listed.version, listed.size, offset, length)


def whole(listed: ListedObject) -> ObjectRange:
    return part_of(listed, 0, listed.size)


async def read(origin: Origin, wanted: ObjectRange) -> bytes:
    return bytes(await origin.read(wanted, Deadline.after(30)))


async def read_twice(origin: Origin, wanted: ObjectRange) -> bytes:
    """Read, and try once more where that fails and may pass. Raises the error of the second attempt."""
    pauses = 0

    async def rest(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            assert patience.last_error is not None
            raise patience.last_error

    patience = Deadline(asyncio.get_running_loop().time() + 60, rest)
    return bytes(await origin.read(wanted, patience))
