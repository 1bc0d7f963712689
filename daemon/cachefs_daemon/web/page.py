"""Serves the web page: its files, and its data as JSON.

Each response has a bounded size, whatever is on the node: long lists come in pages, and of ranks, nodes and errors the
most important ones.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

import msgspec
from aiohttp import web

from cachefs.errors import NotFound, public_url
from cachefs_daemon.datasets.catalog import Dataset
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.node import Node
from cachefs_daemon.web.job_detail import job_detail
from cachefs_daemon.web.job_rows import job_rows
from cachefs_daemon.web.overview import overview
from cachefs_daemon.web.paging import RowPage, page_of
from cachefs_daemon.web.recorder import JobRecorder
from cachefs_daemon.web.shard_maps import EMPTY_MAP, ShardMap, ShardMaps

FRESH_SECONDS: Final = 1.0
# Requests whose responses are kept.
MAX_RESPONSES: Final = 64
log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# By path: the file in `static`, and its type.
FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Characters of a requested name.
MAX_NAME: Final = 512
# Seconds between two checks for data that no browser requests any more.
TIDY_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A dataset at its current snapshot."""

    name: str
    url: str
    # "" where it is lost.
    snapshot: str
    files: int
    bytes: int
    # Unix seconds at which the snapshot was made.
    created: float
    # Keys of the origin that are not files.
    problems: int
    # The share of each tier that it may take.
    share: float
    # Jobs that read it now.
    jobs: int


def dataset_rows(node: Node, page: int, match: str) -> RowPage[DatasetRow]:
    """Return datasets, those with jobs first, then by name. match: a part of the name."""
    readers = _readers(node)
    wanted = match.casefold()
    found = [one for one in node.catalog if wanted in one.record.name.casefold()]
    found.sort(key=lambda one: (-readers[one.record.name], one.record.name))
    shown = page_of(found, page)
    return RowPage([_row(one, readers) for one in shown.rows], shown.page, shown.pages, shown.total)


def dataset_row(node: Node, name: str) -> DatasetRow:
    """Return one dataset. Raises NotFound."""
    return _row(node.catalog.get(name), _readers(node))


def _readers(node: Node) -> Counter[str]:
    """Return the number of jobs that read each dataset, by name."""
    running = (job for job in node.jobs if job.state == JobState.RUNNING)
    return Counter(name for job in running for name in set(job.datasets.values()))


def _row(dataset: Dataset, readers: Counter[str]) -> DatasetRow:
    record, snapshot = dataset.record, dataset.current
    return DatasetRow(
        name=record.name,
        url=public_url(record.url),
        snapshot=snapshot.id if snapshot else "",
        files=snapshot.files if snapshot else 0,
        bytes=snapshot.bytes if snapshot else 0,
        created=snapshot.created_ns / 1e9 if snapshot else 0.0,
        problems=snapshot.problem_count if snapshot else 0,
        share=record.share,
        jobs=readers[record.name],
    )


@dataclass(slots=True)
class _CachedResponse:
    made_at: float = float("-inf")  # monotonic seconds
    body: bytes = b""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ResponseCache:
    """Caches the MAX_RESPONSES latest responses. Used on the event loop."""

    def __init__(self) -> None:
        self._responses: dict[str, _CachedResponse] = {}  # by request, the latest one last

    async def get_or_make(self, request: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the result of *make*, at most a second old. A failure is not kept."""
        response = self._responses.pop(request, None) or _CachedResponse()
        self._responses[request] = response
        while len(self._responses) > MAX_RESPONSES:
            del self._responses[next(iter(self._responses))]
        async with response.lock:
            if time.monotonic() - response.made_at >= FRESH_SECONDS:
                response.body = await make()
                response.made_at = time.monotonic()
            return response.body


class WebPage:
    """The web page of the node. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._recorder = JobRecorder(node)
        self._shards = ShardMaps(node)
        self._response_cache = ResponseCache()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by path."""
        files: dict[str, Handler] = {path: _file(*what) for path, what in FILES.items()}
        return files | {
            "/api/overview": self._json_handler(self._overview),
            "/api/jobs": self._json_handler(self._jobs),
            "/api/job": self._json_handler(self._job),
            "/api/datasets": self._json_handler(self._datasets),
            "/api/dataset": self._json_handler(self._dataset),
        }

    async def run(self) -> None:
        """Record the history, and drop unused data, as long as the daemon runs."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._recorder.run())
                group.create_task(self._tidy())
        finally:
            self._shards.close()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                self._shards.forget_unseen()
            except Exception:
                log.exception("failed to drop unused shard maps")

    def _json_handler(self, make: Callable[[Mapping[str, str]], Awaitable[object]]) -> Handler:
        async def made(query: Mapping[str, str]) -> bytes:
            return msgspec.json.encode(await make(query))

        async def handler(request: web.Request) -> web.Response:
            query = {key: value[:MAX_NAME] for key, value in request.query.items()}
            try:
                body = await self._response_cache.get_or_make(
                    f"{request.path} {sorted(query.items())}", lambda: made(query)
                )
            except NotFound as error:
                return web.Response(status=404, text=f"{error}\n")
            return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

        return handler

    async def _overview(self, _: Mapping[str, str]) -> object:
        usage = await self._node.threads.run(self._node.storage.usage)
        return overview(self._node, usage)

    async def _jobs(self, query: Mapping[str, str]) -> object:
        return job_rows(self._node, _number(query))

    async def _job(self, query: Mapping[str, str]) -> object:
        job = self._node.jobs.get(query.get("name", ""))
        return job_detail(self._node, job.name, self._recorder.history_of(job))

    async def _datasets(self, query: Mapping[str, str]) -> object:
        return dataset_rows(self._node, _number(query), query.get("match", ""))

    async def _dataset(self, query: Mapping[str, str]) -> object:
        name = query.get("name", "")
        snapshot = self._node.catalog.get(name).current
        shards = await self._shards.map_of(snapshot) if snapshot is not None else EMPTY_MAP
        return _DatasetDetail(dataset_row(self._node, name), shards)


class _DatasetDetail(msgspec.Struct, frozen=True):
    dataset: DatasetRow
    shards: ShardMap


def _number(query: Mapping[str, str]) -> int:
    text = query.get("page", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 0


def _file(name: str, content_type: str) -> Handler:
    body = resources.files(__package__).joinpath("static", name).read_bytes()
    tag = hashlib.sha256(body).hexdigest()[:16]

    async def handler(request: web.Request) -> web.Response:
        headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)

    return handler
