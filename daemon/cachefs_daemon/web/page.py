"""Serves the web page: its files, and its data as JSON.

Each response has a bounded size, whatever is on the node: long lists come in pages, and of ranks, nodes and errors the
most important ones.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Final

import msgspec
from aiohttp import web

from cachefs.errors import NotFound
from cachefs_daemon.node import Node
from cachefs_daemon.web.dataset_rows import DatasetRow, dataset_row, dataset_rows
from cachefs_daemon.web.job_detail import job_detail
from cachefs_daemon.web.job_rows import job_rows
from cachefs_daemon.web.overview import overview
from cachefs_daemon.web.recorder import JobRecorder
from cachefs_daemon.web.response_cache import ResponseCache
from cachefs_daemon.web.shard_maps import EMPTY_MAP, ShardMap, ShardMaps

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
