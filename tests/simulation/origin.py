"""A simulated object store, and the origins by which nodes read it.

Objects have versions, and the bytes of a version follow from its name. A request may be slow, be refused, hang, end
early, or find another version than the one that was listed; an origin answers these as the product's own origins do.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from cachefs.errors import ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import Data, ObjectRange
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.retry import Failure, run_with_retries
from tests.simulation.loop import PROCESS
from tests.simulation.system import Machine

URL: Final = "s3://bucket/set"
HOST: Final = "origin"
# Seconds without a byte after which an attempt is given up.
READ_TIMEOUT: Final = 5.0

Trace = Callable[..., None]


def bytes_of(key: bytes, version: bytes, size: int) -> bytes:
    """Return the bytes of a version of an object."""
    piece = xxhash.xxh3_128_digest(key + b"@" + version)
    return (piece * (size // 16 + 1))[:size]


@dataclass
class Weather:
    """How the store behaves now. Shares are of all requests."""

    latency: float = 0.01
    refused: float = 0.0  # 503
    hangs: float = 0.0
    truncated: float = 0.0
    short: float = 0.0  # the client itself does not notice that bytes are missing
    is_down: bool = False
    denied: set[str] = field(default_factory=set)  # hosts


class ObjectStore:
    """The store."""

    def __init__(self, loop: Machine, chances: random.Random, trace: Trace) -> None:
        self.loop = loop
        self.chances = chances
        self.trace = trace
        self.weather = Weather()
        self.objects: dict[bytes, tuple[bytes, int]] = {}  # version and size, by key
        self.changed: set[bytes] = set()  # keys whose object was replaced after it was listed
        self.bytes = 0  # sent
        self.reads: Counter[tuple[bytes, int]] = Counter()  # by key and offset: requests that were answered
        # By process, key and offset: requests that are under way.
        self.under_way: Counter[tuple[int, bytes, int]] = Counter()
        self.on_twice: Callable[[str, bytes], None] = lambda host, key: None

    def put(self, key: bytes, size: int) -> None:
        """Upload an object, or replace one."""
        before = self.objects.get(key)
        version = b"%d" % (int(before[0]) + 1 if before is not None else 1)
        if before is not None:
            self.changed.add(key)
        self.objects[key] = version, size

    async def get(self, host: str, wanted: ObjectRange) -> bytes:
        """Answer a GET with If-Match. Raises what the client makes of the answer."""
        place = id(PROCESS.get()), wanted.key + b"@" + wanted.version, wanted.offset
        self.under_way[place] += 1
        if self.under_way[place] > 1:
            self.on_twice(host, wanted.key)
        try:
            return await self._get(host, wanted)
        finally:
            self.under_way[place] -= 1

    async def _get(self, host: str, wanted: ObjectRange) -> bytes:
        weather, network = self.weather, self.loop.network
        name = wanted.key.decode()
        if network.is_cut(host, HOST) or network.is_cut(HOST, host) or self._happens(weather.hangs):
            self.trace("origin hangs", host, name)
            await asyncio.sleep(READ_TIMEOUT)
            raise OriginUnavailable(f"{URL}/{name}: no byte for {READ_TIMEOUT:.0f} s")
        await asyncio.sleep(weather.latency * (0.5 + self.chances.random()))
        if weather.is_down:
            self.trace("origin down", host, name)
            raise OriginUnavailable(f"{URL}/{name}: connection refused")
        if host in weather.denied:
            self.trace("origin denies", host, name)
            raise OriginAccessDenied(f"{URL}/{name}: access denied")
        if self._happens(weather.refused):
            self.trace("origin 503", host, name)
            raise OriginUnavailable(f"{URL}/{name}: 503 slow down")
        version, size = self.objects.get(wanted.key, (b"", 0))
        if version != wanted.version:
            raise ObjectChanged(f"{URL}/{name} has changed since it was listed")
        data = bytes_of(wanted.key, version, size)[wanted.offset : wanted.offset + wanted.length]
        self.bytes += len(data)
        if self._happens(weather.truncated):
            self.trace("origin truncates", host, name)
            raise OriginUnavailable(f"{URL}/{name}: the answer ended early")
        if len(data) > 1 and self._happens(weather.short):
            self.trace("origin is short", host, name)
            return data[: self.chances.randrange(1, len(data))]
        self.reads[wanted.key, wanted.offset] += 1
        self.trace("origin", host, name, wanted.offset)
        return data

    def _happens(self, share: float) -> bool:
        return share > 0 and self.chances.random() < share


class SimulatedOrigin:
    """The origin of a dataset, as one node reads it."""

    def __init__(self, store: ObjectStore) -> None:
        self.url = URL
        self.requests = self.errors = self.fallback_reads = 0
        self.endpoint = Endpoint(URL, 64)
        self._store = store

    def identity(self, key: bytes) -> bytes:
        return URL.encode() + b"/" + key

    async def list(self, report: Any) -> AsyncIterator[list[ListedObject]]:
        yield [ListedObject(key, size, version) for key, (version, size) in self._store.objects.items()]  # type: ignore[call-arg]

    async def read(self, wanted: ObjectRange, patience: Deadline) -> Data:
        process = PROCESS.get()
        assert process is not None

        async def attempt() -> bytes:
            self.requests += 1
            return await self._store.get(process.host, wanted)

        return await run_with_retries(attempt, _judge, wanted.key, patience)

    async def close(self) -> None: ...


def _judge(error: Exception) -> Failure:
    if isinstance(error, OriginUnavailable):
        return Failure(error, transient=True)
    if isinstance(error, OriginAccessDenied | ObjectChanged):
        return Failure(error, transient=False)
    raise error
