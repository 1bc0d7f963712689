"""A small API server of Kubernetes with pods, events and Leases, and the rules that clients of them meet.

Bodies are checked against the published schemas (package kubernetes-validate), unknown fields included, and paths
against those that the published OpenAPI description has (as generated into kubernetes_asyncio). Versions conflict,
lists come in pages, watches begin at a version, have bookmarks, and end with 410 where that is too old; what no longer
matches a selector is DELETED for who watches with it. Pods that are made go through a webhook, and gates can only be
taken away. It follows the reference ("Kubernetes API Concepts", the API reference of 1.36); what a real server does
beyond that is not tested with it.
"""

import asyncio
import base64
import copy
import inspect
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from aiohttp import web
from kubernetes_asyncio.client.api import coordination_v1_api, core_v1_api

VERSION = "1.36.0"
_GROUPS = {"pods": "/api/v1", "events": "/api/v1", "leases": "/apis/coordination.k8s.io/v1"}
_KINDS = {"pods": ("v1", "Pod"), "events": ("v1", "Event"), "leases": ("coordination.k8s.io/v1", "Lease")}
_SCHEMAS = {"pods": "core.v1.Pod", "events": "core.v1.Event", "leases": "coordination.v1.Lease"}

Object = dict[str, Any]
Key = tuple[str, str, str]  # resource, namespace, name


@cache
def definitions() -> Object:
    """The published schemas of all kinds, which refuse unknown fields."""
    path = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}-local-strict"
    text = (path / "_definitions.json").read_text()
    # References go to a file by its address; here they stay in the document.
    return dict(json.loads(text.replace("/api/_definitions.json#", "#")))


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """For a kind by its name, such as `core.v1.Pod`."""
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/io.k8s.api.{name}", "$defs": definitions()["$defs"]})


def problems(name: str, found: Any) -> list[str]:
    """What the published schema of a kind says against it."""
    return [f"{error.json_path}: {error.message[:200]}" for error in validator(name).iter_errors(found)]


@cache
def operations() -> frozenset[tuple[str, str]]:
    """Method and path, as OpenAPI writes it, of all published operations on pods, events and Leases."""
    source = inspect.getsource(core_v1_api) + inspect.getsource(coordination_v1_api)
    return frozenset((method, path) for path, method in re.findall(r"'(/apis?/[^']*)', '([A-Z]+)',", source))


class Refused(Exception):
    """A request that is answered with a Status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ApiServer:
    """Runs on a loop of its own in a thread. Its attributes may be set at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "first"
        self.requests: list[str] = []  # method and path of each, oldest first
        self.down = False  # hang up on everybody
        self.broken = 0  # answer so many requests with 500
        # Called with an AdmissionReview for each pod that is made; gives the answer, or raises.
        self.webhook: Callable[[Object], Object] | None = None
        # The only namespace whose objects clients may use; None: all.
        self.namespace: str | None = None
        # What clients may do, as rules of a Role; None: everything.
        self.rules: list[Object] | None = None
        self.warnings: list[str] = []  # what the webhook wanted its user to read
        self._version = 100
        self._oldest = 0  # version below which no watch can begin
        self._objects: dict[Key, Object] = {}
        self._history: list[tuple[int, Key, Object | None, Object]] = []  # version, key, before, after
        self._changed = asyncio.Condition()
        self._round = 0  # of watches, all of which end when it changes
        self._loop = asyncio.new_event_loop()

    # --- for tests ---------------------------------------------------------------------------------------------------

    def make_pod(self, pod: Object) -> Object:
        """As a user or a controller makes one: it goes through the webhook."""
        return dict(self._do(self._create("pods", pod["metadata"]["namespace"], pod)))

    def pod(self, name: str, namespace: str = "training") -> Object:
        return copy.deepcopy(self._objects["pods", namespace, name])

    def bind(self, name: str, node: str, namespace: str = "training") -> None:
        """As kube-scheduler does."""

        def bound(pod: Object) -> None:
            assert not pod["spec"].get("schedulingGates"), "kube-scheduler does not see pods with gates"
            pod["spec"]["nodeName"] = node

        self._do(self._change(("pods", namespace, name), bound))

    def finish(self, name: str, phase: str = "Succeeded", namespace: str = "training") -> None:
        self._do(self._change(("pods", namespace, name), lambda pod: pod["status"].update(phase=phase)))

    def annotate(self, name: str, annotations: dict[str, str], namespace: str = "training") -> None:
        self._do(self._change(("pods", namespace, name), lambda pod: pod["metadata"].update(annotations=annotations)))

    def remove(self, resource: str, name: str, namespace: str = "training") -> None:
        self._do(self._delete((resource, namespace, name)))

    def events(self, reason: str = "") -> list[Object]:
        """All that were written, oldest first, or those with a reason."""
        found = [found for (resource, _, _), found in list(self._objects.items()) if resource == "events"]
        return [event for event in found if event["reason"] == reason or not reason]

    def lease(self, name: str, namespace: str = "cachefs") -> Object:
        return copy.deepcopy(self._objects["leases", namespace, name])

    def leases(self, namespace: str = "cachefs") -> dict[str, Object]:
        """All of a namespace, by name."""
        known = list(self._objects.items())
        return {key[2]: copy.deepcopy(found) for key, found in known if key[:2] == ("leases", namespace)}

    def put_lease(self, lease: Object, namespace: str = "cachefs") -> None:
        """As another client makes it. What the server itself sets is left out."""
        metadata = {name: value for name, value in lease["metadata"].items() if name not in ("uid", "resourceVersion")}
        self._do(self._create("leases", namespace, lease | {"metadata": metadata}))

    def compact(self) -> None:
        """End all watches, and forget what has changed until now."""
        self._do(self._compact())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    # --- what is stored ----------------------------------------------------------------------------------------------

    async def _compact(self) -> None:
        async with self._changed:
            self._version += 1
            self._oldest = self._version
            self._history.clear()
            self._round += 1
            self._changed.notify_all()

    async def _store(self, key: Key, found: Object) -> Object:
        """A new state of an object, which is checked."""
        api_version, kind = _KINDS[key[0]]
        if (found.get("apiVersion", api_version), found.get("kind", kind)) != (api_version, kind):
            raise Refused(400, f"the object is no {kind} of {api_version}")
        if wrong := problems(_SCHEMAS[key[0]], found):
            raise Refused(422, "; ".join(wrong))
        async with self._changed:
            self._version += 1
            before = self._objects.get(key)
            found = copy.deepcopy(found) | {"apiVersion": api_version, "kind": kind}
            found["metadata"]["resourceVersion"] = str(self._version)
            self._objects[key] = found
            self._history.append((self._version, key, before, found))
            self._changed.notify_all()
        return copy.deepcopy(found)

    async def _change(self, key: Key, change: Callable[[Object], None]) -> Object:
        found = copy.deepcopy(self._objects[key])
        change(found)
        return await self._store(key, found)

    async def _delete(self, key: Key) -> None:
        async with self._changed:
            self._version += 1
            before = self._objects.pop(key)
            gone = copy.deepcopy(before)
            gone["metadata"] |= {"resourceVersion": str(self._version), "deletionTimestamp": "2026-01-01T00:00:00Z"}
            self._history.append((self._version, key, before, gone))
            self._changed.notify_all()

    async def _create(self, resource: str, namespace: str, found: Object) -> Object:
        if wrong := problems(_SCHEMAS[resource], found):
            raise Refused(422, "; ".join(wrong))
        found = copy.deepcopy(found)
        if found["metadata"].setdefault("namespace", namespace) != namespace:
            raise Refused(400, "the namespace of the object is not that of the request")
        if resource == "events" and found["involvedObject"].get("namespace") != namespace:
            raise Refused(422, "involvedObject.namespace: does not match event.namespace")
        if "resourceVersion" in found["metadata"]:
            raise Refused(400, "resourceVersion should not be set on objects to be created")
        key = (resource, namespace, found["metadata"]["name"])
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", key[2]):
            raise Refused(422, f"metadata.name: {key[2]!r} is no lowercase RFC 1123 subdomain")
        if key in self._objects:
            raise Refused(409, f"{resource} {key[2]!r} already exists")
        if resource == "pods":
            found = await asyncio.to_thread(self._admitted, found)
            found.setdefault("status", {"phase": "Pending"})
        found["metadata"]["uid"] = str(uuid.uuid4())
        return await self._store(key, found)

    def _admitted(self, pod: Object) -> Object:
        """The pod as the webhook wants it. failurePolicy is Ignore."""
        if self.webhook is None:
            return pod
        review = {
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": str(uuid.uuid4()), "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE",
                "resource": {"group": "", "version": "v1", "resource": "pods"}, "name": pod["metadata"].get("name", ""),
                "namespace": pod["metadata"]["namespace"], "object": pod, "oldObject": None, "dryRun": False,
                "userInfo": {"username": "a-user"},
                "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
            },
        }  # fmt: skip
        try:
            answer = self.webhook(review)
        except Exception:
            return pod
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response = answer["response"]
        assert response["uid"] == review["request"]["uid"]  # type: ignore[index]
        assert set(response) <= {"uid", "allowed", "patchType", "patch", "warnings"}
        self.warnings += response.get("warnings", [])
        if "patch" not in response:
            return pod
        assert response["patchType"] == "JSONPatch"
        return patched(pod, json.loads(base64.b64decode(response["patch"])))

    # --- the API -----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.down:
            assert request.transport is not None
            request.transport.abort()
            return _status(500, "hung up")
        if self.broken:
            self.broken -= 1
            return _status(500, "etcdserver: request timed out")
        try:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized")
            route = request.match_info.route.resource
            if route is None or (request.method, route.canonical) not in operations():
                raise Refused(404, f"no published operation is {request.method} {request.path}")
            self._check_rules(request)
            answer: web.StreamResponse = await handler(request)
            return answer
        except Refused as error:
            return _status(error.code, str(error))

    def _check_rules(self, request: web.Request) -> None:
        group = "coordination.k8s.io" if request.path.startswith("/apis/coordination.k8s.io/") else ""
        has_name = "name" in request.match_info
        resource = request.path.split("/")[-2 if has_name else -1]
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        verbs["GET"] = "get" if has_name else "list"
        verb = "watch" if request.query.get("watch") else verbs[request.method]
        if self.namespace is not None and request.match_info.get("namespace") != self.namespace:
            raise Refused(403, f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}" there')
        for rule in self.rules or ():
            if group not in rule["apiGroups"] or resource not in rule["resources"] or verb not in rule["verbs"]:
                continue
            # What is listed or created has no name yet.
            if "resourceNames" not in rule or request.match_info.get("name") in rule["resourceNames"]:
                return
        if self.rules is not None:
            raise Refused(403, f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}"')

    async def _list(self, request: web.Request) -> web.StreamResponse:
        resource = request.path.rpartition("/")[2]
        query = request.query
        if query.get("watch") in ("true", "1", "True"):
            return await self._watch(request, resource)
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "100000"))
        namespace = request.match_info.get("namespace")
        chosen = [
            found
            for key, found in sorted(self._objects.items())
            if key[0] == resource and namespace in (None, key[1]) and _matches(found, request)
        ]
        metadata: Object = {"resourceVersion": str(self._version)}
        if start + limit < len(chosen):
            metadata |= {"continue": str(start + limit), "remainingItemCount": len(chosen) - start - limit}
        api_version, kind = _KINDS[resource]
        items = chosen[start : start + limit]
        return web.json_response(
            {"apiVersion": api_version, "kind": f"{kind}List", "metadata": metadata, "items": items}
        )

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        if version < self._oldest:
            raise Refused(410, "too old resource version")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        number = self._round
        while number == self._round and not self.down:
            async with self._changed:
                fresh = [each for each in self._history if each[0] > version]
                if not fresh:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 0.2)
                    continue
            version = fresh[-1][0]
            for _, key, before, after in fresh:
                if key[0] != resource or request.match_info.get("namespace", key[1]) != key[1]:
                    continue
                if kind := _seen_as(before, after, request):
                    await _line(answer, kind, after)
            if request.query.get("allowWatchBookmarks"):
                api_version, kind = _KINDS[resource]
                metadata = {"resourceVersion": str(version), "creationTimestamp": None}
                await _line(answer, "BOOKMARK", {"apiVersion": api_version, "kind": kind, "metadata": metadata})
        if version < self._oldest:
            gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
            await _line(answer, "ERROR", gone)
        return answer

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._found(request)[1])

    async def _post(self, request: web.Request) -> web.StreamResponse:
        resource = request.path.rpartition("/")[2]
        found = await self._create(resource, request.match_info["namespace"], await request.json())
        return web.json_response(found, status=201)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        key, old = self._found(request)
        found = await request.json()
        if (version := found["metadata"].get("resourceVersion")) and version != old["metadata"]["resourceVersion"]:
            raise Refused(409, "the object has been modified; please apply your changes to the latest version")
        if found["metadata"].get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise Refused(409, "the UID in the precondition is another one")
        found["metadata"] |= {"uid": old["metadata"]["uid"]}
        return web.json_response(await self._store(key, found))

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        key, old = self._found(request)
        if request.content_type != "application/json-patch+json":
            raise Refused(415, f"this double does not know {request.content_type}")
        found = patched(old, await request.json())
        if key[0] == "pods":
            _check_pod(old, found)
        return web.json_response(await self._store(key, found))

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        key, old = self._found(request)
        options = await request.json() if request.can_read_body else {}
        for name, wanted in (options.get("preconditions") or {}).items():
            if old["metadata"][name] != wanted:
                raise Refused(409, f"the {name} in the precondition is another one")
        await self._delete(key)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def _found(self, request: web.Request) -> tuple[Key, Object]:
        *_, namespace, resource, name = request.path.split("/")
        key = (resource, namespace, name)
        if key not in self._objects:
            raise Refused(404, f'{resource} "{name}" not found')
        return key, self._objects[key]

    async def serve(self) -> None:
        app = web.Application(middlewares=[self._answer])
        for resource, group in _GROUPS.items():
            app.router.add_get(f"{group}/{resource}", self._list)
            place = f"{group}/namespaces/{{namespace}}/{resource}"
            app.router.add_get(place, self._list)
            app.router.add_post(place, self._post)
            app.router.add_get(f"{place}/{{name}}", self._get)
            app.router.add_put(f"{place}/{{name}}", self._put)
            app.router.add_patch(f"{place}/{{name}}", self._patch)
            app.router.add_delete(f"{place}/{{name}}", self._remove)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def end(self) -> None:
        self.down = True
        await self._runner.cleanup()

    def kubeconfig(self, path: Path) -> Path:
        """A file for clients, with the token that it has now."""
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "here",
                    "clusters": [{"name": "here", "cluster": {"server": self.url}}],
                    "contexts": [
                        {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "cachefs"}}
                    ],
                    "users": [{"name": "me", "user": {"token": self.token}}],
                }
            )
        )  # fmt: skip
        return path


@contextmanager
def running() -> Iterator[ApiServer]:
    server = ApiServer()
    thread = threading.Thread(target=server._loop.run_forever, name="api-server", daemon=True)
    thread.start()
    try:
        server._do(server.serve())
        yield server
    finally:
        server._do(server.end())
        server._loop.call_soon_threadsafe(server._loop.stop)
        thread.join(20)


def patched(found: Object, patch: list[Object]) -> Object:
    """RFC 6902, as far as it is used: add, remove, replace, test."""
    found = copy.deepcopy(found)
    for step in patch:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        place: Any = found
        try:
            for part in way:
                place = place[int(part) if isinstance(place, list) else part]
            _step(place, last, step)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(422, f"the server rejected our request due to an error in our request: {error!r}") from None
    return found


def _step(place: Any, last: str, step: Object) -> None:
    key: Any = last if not isinstance(place, list) else len(place) if last == "-" else int(last)
    kind = step["op"]
    if kind == "add" and isinstance(place, list):
        place.insert(key, step["value"])
    elif kind in ("add", "replace"):
        if kind == "replace":
            place[key]
        place[key] = step["value"]
    elif kind == "remove":
        del place[key]
    elif kind != "test" or place[key] != step["value"]:
        raise ValueError(f"{kind} of {step['path']}")


def _check_pod(old: Object, found: Object) -> None:
    """Gates can be taken away, and else nothing of a spec may change."""
    before, after = copy.deepcopy(old["spec"]), copy.deepcopy(found["spec"])
    gates = before.pop("schedulingGates", [])
    if not all(gate in gates for gate in after.pop("schedulingGates", None) or []):
        raise Refused(422, "spec.schedulingGates: only deletion is allowed")
    if before != after:
        raise Refused(422, "spec: Forbidden: pod updates may not change fields other than ...")


def _matches(found: Object, request: web.Request) -> bool:
    """Does it match the selectors of a request?"""
    labels = found["metadata"].get("labels", {})
    for term in filter(None, request.query.get("labelSelector", "").split(",")):
        name, separator, value = term.partition("=")
        if name not in labels or (separator and labels[name] != value):
            return False
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        name, value = term.split("!=")
        assert name == "status.phase", name
        if found["status"].get("phase") == value:
            return False
    return True


def _seen_as(before: Object | None, after: Object, request: web.Request) -> str:
    """The kind of a change for somebody with selectors; "": none."""
    was = before is not None and _matches(before, request)
    is_now = "deletionTimestamp" not in after["metadata"] and _matches(after, request)
    return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, is_now), "")


async def _line(answer: web.StreamResponse, kind: str, found: Object) -> None:
    await answer.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")


def _status(code: int, message: str) -> web.Response:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }
    return web.json_response(status, status=code)
