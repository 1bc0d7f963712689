"""A service that says what a test wants: cachefs-scheduler's API, with the messages of cachefs.scheduling_messages.

Its view of the nodes is what a test puts there. Each dataset has so many slots; jobs get them in the order of asking.
tests/scheduler/slurm/test_real_service.py runs the real one.
"""

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from cachefs.scheduling_messages import (
    ADMISSIONS_PATH,
    ADMIT_PATH,
    ENDED_PATH,
    KNOWN_PATH,
    NODES_PATH,
    PLACED_PATH,
    RESIZED_PATH,
    DatasetPart,
    JobAdmission,
    JobAdmissions,
    JobEndReport,
    KnownJobs,
    NodesStatus,
    NodeStatus,
    PlacementReport,
    PlacementRequest,
)

_POLL = 5.0  # seconds
_Result = TypeVar("_Result")


class ServiceDouble:
    """It answers on a unix socket, from a thread of its own."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        # By node and dataset: the part that is there.
        self.parts: dict[str, dict[str, float]] = {}
        self.slots: dict[str, int] = {}
        # What it was told, by job.
        self.placed: dict[str, tuple[str, ...]] = {}
        self.resized: list[str] = []
        self.ended: set[str] = set()
        self.asks: dict[str, PlacementRequest] = {}
        self._granted: dict[str, str] = {}  # by job, the dataset
        self._version = 0
        self._changed = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="service-double", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Begin to answer."""
        self._do(self._start())

    def stop(self) -> None:
        """End: connections are refused from now on."""
        self._do(self._stop())

    def close(self) -> None:
        """End it, and its thread."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set_slots(self, dataset: str, count: int) -> None:
        """So many jobs may read it at once."""
        self.slots[dataset] = count
        self._do(self._tell())

    def _do(self, work: Awaitable[_Result]) -> _Result:
        async def run() -> _Result:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get(NODES_PATH, self._nodes)
        app.router.add_get(ADMISSIONS_PATH, self._admissions)
        app.router.add_get(KNOWN_PATH, self._known)
        for path, answer in (
            (ADMIT_PATH, self._admit),
            (PLACED_PATH, self._place),
            (RESIZED_PATH, self._resize),
            (ENDED_PATH, self._end),
        ):
            app.router.add_post(path, answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self.socket.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._tell()
            await self._runner.cleanup()
            self._runner = None

    async def _nodes(self, _: web.Request) -> web.Response:
        return _json(NodesStatus([_status(node, held) for node, held in sorted(self.parts.items())]))

    async def _admissions(self, request: web.Request) -> web.Response:
        after = request.query.get("after")
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL), self._changed:
                await self._changed.wait_for(lambda: after is None or int(after) != self._version)
        return _json(
            JobAdmissions(self._version, [self._admission(job) for job in self.asks if job not in self.placed])
        )

    async def _admit(self, request: web.Request) -> web.Response:
        ask = msgspec.json.decode(await request.read(), type=PlacementRequest)
        self.asks[ask.job] = ask
        return _json(self._admission(ask.job))

    def _admission(self, job: str) -> JobAdmission:
        dataset = self.asks[job].dataset.partition("@")[0]
        if job not in self._granted:
            taken = sum(each == dataset for each in self._granted.values())
            if taken >= self.slots.get(dataset, 1 << 30):
                return JobAdmission(job, go=False, why="no slot", place=1)
            self._granted[job] = dataset
        return JobAdmission(job, go=True)

    async def _place(self, request: web.Request) -> web.Response:
        placed = msgspec.json.decode(await request.read(), type=PlacementReport)
        assert placed.ask is not None
        self.placed[placed.job] = tuple(placed.nodes)
        self._granted[placed.job] = placed.ask.dataset.partition("@")[0]
        return _json(None)

    async def _resize(self, request: web.Request) -> web.Response:
        placed = msgspec.json.decode(await request.read(), type=PlacementReport)
        self.placed[placed.job] = tuple(placed.nodes)
        self.resized.append(placed.job)
        return _json(None)

    async def _end(self, request: web.Request) -> web.Response:
        job = msgspec.json.decode(await request.read(), type=JobEndReport).job
        self.ended.add(job)
        self.asks.pop(job, None)
        self._granted.pop(job, None)
        await self._tell()
        return _json(None)

    async def _known(self, request: web.Request) -> web.Response:
        names = {*self.asks, *self.placed} - self.ended
        return _json(KnownJobs([name for name in names if name.startswith(request.query["prefix"])]))

    async def _tell(self) -> None:
        self._version += 1
        async with self._changed:
            self._changed.notify_all()


@contextmanager
def running_double(socket: Path) -> Iterator[ServiceDouble]:
    """One that answers."""
    double = ServiceDouble(socket)
    double.start()
    try:
        yield double
    finally:
        double.close()


def _status(node: str, held: dict[str, float]) -> NodeStatus:
    return NodeStatus(
        node, "active", 0.0, datasets=[DatasetPart(name, round(1e9 * part), 10**9) for name, part in held.items()]
    )


def _json(message: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")
