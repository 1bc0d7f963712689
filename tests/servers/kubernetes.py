"""A small server with the part of Kubernetes' API that is about Leases, and its rules: versions that conflict, labels,
lists in pages, watches that begin at a version and end with 410 where that is too old, bookmarks, tokens.

No API server is installable on a test machine. This one follows the reference ("Kubernetes API Concepts" and the API of
coordination.k8s.io/v1); what a real one does beyond that is not tested.
"""

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

_PATH = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
NAMESPACE = "training"


class Kubernetes:
    """Runs on a loop of its own in a thread. Its attributes may be set at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "first"
        self.requests: list[str] = []  # method and path of each, oldest first
        self.down = False  # hang up on everybody
        self._version = 100
        self._oldest = 0  # version below which no watch can begin
        self._leases: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._round = 0  # of watches, all of which end when it changes
        self._loop = asyncio.new_event_loop()

    # --- for tests ---------------------------------------------------------------------------------------------------

    def leases(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return dict(self._leases)

    def compact(self) -> None:
        """End all watches, and forget what has changed until now."""
        self._do(self._compact())

    def remove(self, name: str) -> None:
        self._do(self._change("DELETED", name, None))

    def put(self, lease: dict[str, Any]) -> None:
        self._do(self._change("ADDED", lease["metadata"]["name"], lease))

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _compact(self) -> None:
        async with self._changed:
            self._oldest = self._version
            self._history.clear()
            self._round += 1
            self._changed.notify_all()

    # --- the API -----------------------------------------------------------------------------------------------------

    async def _change(self, kind: str, name: str, lease: dict[str, Any] | None) -> dict[str, Any]:
        async with self._changed:
            self._version += 1
            shown = json.loads(json.dumps(lease if lease is not None else self._leases[name]))
            shown["metadata"]["resourceVersion"] = str(self._version)
            shown["metadata"].setdefault("uid", str(uuid.uuid4()))
            if lease is None:
                del self._leases[name]
            else:
                self._leases[name] = shown
            self._history.append((self._version, kind, shown))
            self._changed.notify_all()
            return dict(shown)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.down:
            assert request.transport is not None
            request.transport.abort()
            return _status(500, "hung up")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if request.match_info.get("namespace") != NAMESPACE:
            return _status(403, 'leases.coordination.k8s.io is forbidden: User "pod" cannot use it there')
        found: web.StreamResponse = await handler(request)
        return found

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            return await self._watch(request)
        chosen = sorted(name for name, lease in self._leases.items() if _matches(lease, request))
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        metadata = {"resourceVersion": str(self._version)}
        if start + limit < len(chosen):
            metadata["continue"] = str(start + limit)
        items = [self._leases[name] for name in chosen[start : start + limit]]
        return web.json_response({"kind": "LeaseList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        number = self._round
        if version < self._oldest:
            error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await _line(answer, "ERROR", error)
            return answer
        while number == self._round and not self.down:
            async with self._changed:
                fresh = [each for each in self._history if each[0] > version]
                if not fresh:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 0.5)
                    continue
            version = fresh[-1][0]
            for _, kind, lease in fresh:
                if _matches(lease, request):
                    await _line(answer, kind, lease)
            bookmark = {"kind": "Lease", "metadata": {"resourceVersion": str(version)}}
            await _line(answer, "BOOKMARK", bookmark)
        return answer

    async def _get(self, request: web.Request) -> web.StreamResponse:
        lease = self._leases.get(request.match_info["name"])
        return web.json_response(lease) if lease is not None else _status(404, "not found")

    async def _create(self, request: web.Request) -> web.StreamResponse:
        lease = await request.json()
        if lease["metadata"]["name"] in self._leases:
            return _status(409, "already exists")
        if "resourceVersion" in lease["metadata"]:
            return _status(400, "resourceVersion should not be set on objects to be created")
        return web.json_response(await self._change("ADDED", lease["metadata"]["name"], lease), status=201)

    async def _update(self, request: web.Request) -> web.StreamResponse:
        name, lease = request.match_info["name"], await request.json()
        if name not in self._leases:
            return _status(404, "not found")
        if lease["metadata"].get("resourceVersion") != self._leases[name]["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        lease["metadata"]["uid"] = self._leases[name]["metadata"]["uid"]
        return web.json_response(await self._change("MODIFIED", name, lease))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._leases:
            return _status(404, "not found")
        wanted = (await request.json()).get("preconditions", {}).get("resourceVersion")
        if wanted not in (None, self._leases[name]["metadata"]["resourceVersion"]):
            return _status(409, "the object has been modified")
        return web.json_response(await self._change("DELETED", name, None))

    # --- its thread --------------------------------------------------------------------------------------------------

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._admit])
        one = _PATH + "/{name}"
        app.add_routes([
            web.get(_PATH, self._list), web.post(_PATH, self._create), web.get(one, self._get),
            web.put(one, self._update), web.delete(one, self._delete),
        ])  # fmt: skip
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


def _matches(lease: dict[str, Any], request: web.Request) -> bool:
    selector = request.query.get("labelSelector", "")
    labels = lease["metadata"].get("labels", {})
    return all(
        labels.get(key) == value for key, _, value in (each.partition("=") for each in selector.split(",") if each)
    )


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)


async def _line(answer: web.StreamResponse, kind: str, content: dict[str, Any]) -> None:
    await answer.write(json.dumps({"type": kind, "object": content}).encode() + b"\n")


@contextmanager
def running() -> Iterator[Kubernetes]:
    """One without Leases."""
    server = Kubernetes()
    thread = threading.Thread(target=server._loop.run_forever, name="kubernetes-server", daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(server._start(), server._loop).result(20)
    try:
        yield server
    finally:
        server._do(server._compact())
        asyncio.run_coroutine_threadsafe(runner.cleanup(), server._loop).result(20)
        server._loop.call_soon_threadsafe(server._loop.stop)
        thread.join(20)
        server._loop.close()
