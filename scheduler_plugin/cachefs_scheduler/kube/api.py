"""Calls to the API server through kubernetes_asyncio: pods, gates, events and the Lease.

Responses are decoded here, not by the client: this service reads 300 bytes of a pod's 5 to 15 KB, and the client would
build hundreds of objects per pod.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from cachefs.errors import CachefsError, ConfigError
from cachefs.extras import needs_extra
from cachefs_scheduler.kube.notes import Note
from cachefs_scheduler.kube.wire import Metadata, Pod

with needs_extra("kubernetes", "cachefs-scheduler with [kube] api"):
    from kubernetes_asyncio import client, config

# Seconds that a call may take, and after which the API server ends a watch.
CALL_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 290
_PAGE: Final = 500
_MOST_PAGES: Final = 2000
_MOST_ANSWER: Final = 256 << 20
_MOST_LINE: Final = 8 << 20
_MOST_TEXT: Final = 300
# Pods that have ended disappear from lists and watches as if they were deleted.
_LIVE: Final = "status.phase!=Succeeded,status.phase!=Failed"
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ApiAway(CachefsError):
    """The API server does not respond or is overloaded; the call can be retried."""


class ApiRefuses(CachefsError):
    """The API server refuses the call."""


class Changed(CachefsError):
    """The object is missing, or differs from the expected state."""


class Expired(CachefsError):
    """The watch cannot resume; all pods must be listed again."""


class _ListMetadata(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion", default="")
    more: str = msgspec.field(name="continue", default="")


class _PodList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata = _ListMetadata()
    items: list[Pod] | None = None


class _Change(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class LeaseSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a Lease's spec."""

    holder: str | None = msgspec.field(name="holderIdentity", default=None)
    seconds: int | None = msgspec.field(name="leaseDurationSeconds", default=None)
    acquired: str | None = msgspec.field(name="acquireTime", default=None)
    renewed: str | None = msgspec.field(name="renewTime", default=None)
    transitions: int | None = msgspec.field(name="leaseTransitions", default=None)


class Lease(msgspec.Struct, frozen=True):
    """A Lease, whose metadata is sent back unchanged."""

    metadata: dict[str, Any]
    spec: LeaseSpec = LeaseSpec()


_T = TypeVar("_T")

_pods = msgspec.json.Decoder(_PodList)
_pod = msgspec.json.Decoder(Pod)
_change = msgspec.json.Decoder(_Change)
_lease = msgspec.json.Decoder(Lease)


async def connect(place: str, namespace: str) -> "KubernetesApi":
    """Connect to the API server. Raises ConfigError.

    Args:
        place: "pod", or the path of a kubeconfig file.
        namespace: namespace of the Lease; "": that of the pod or the kubeconfig.
    """
    settings = client.Configuration()
    try:
        if place == "pod":
            load: Any = config.load_incluster_config
            load(client_configuration=settings)
            namespace = namespace or (_ACCOUNT / "namespace").read_text().strip()
        else:
            await config.load_kube_config(config_file=place, client_configuration=settings)
            contexts: Any = config.list_kube_config_contexts(config_file=place)
            namespace = namespace or str(contexts[1]["context"].get("namespace") or "")
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"kube.api = {place!r}: {str(error)[:_MOST_TEXT]}") from None
    return KubernetesApi(client.ApiClient(settings), namespace or "default")


class KubernetesApi:
    """A client of the API server, for one event loop."""

    def __init__(self, calls: client.ApiClient, namespace: str) -> None:
        self._calls = calls
        self._core = client.CoreV1Api(calls)
        self._coordination = client.CoordinationV1Api(calls)
        self.namespace = namespace

    async def close(self) -> None:
        await self._calls.close()

    # --- pods --------------------------------------------------------------------------------------------------------

    async def list_pods(self, selector: str) -> AsyncIterator[tuple[list[Pod], str]]:
        """Yield pages of all pods that have not ended, each with the version from which to watch after the last
        page."""
        more = ""
        for _ in range(_MOST_PAGES):
            query = {"limit": _PAGE, "field_selector": _LIVE} | ({"label_selector": selector} if selector else {})
            query |= {"_continue": more} if more else {}
            page = _decoded(_pods, await _answer(self._core.list_pod_for_all_namespaces, query))
            yield page.items or [], page.metadata.version
            if not (more := page.metadata.more):
                return
        raise ApiRefuses(f"the API server lists more than {_MOST_PAGES * _PAGE:,} pods")

    async def watch_pods(self, selector: str, version: str) -> AsyncIterator[tuple[str, Pod]]:
        """Yield the kind (ADDED, MODIFIED, DELETED, BOOKMARK) and the pod of each change, until the server ends the
        watch. Raises Expired, ApiAway, ApiRefuses."""
        query = {
            "watch": True, "resource_version": version, "allow_watch_bookmarks": True, "field_selector": _LIVE,
            "timeout_seconds": WATCH_SECONDS,
        } | ({"label_selector": selector} if selector else {})  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS, sock_read=WATCH_SECONDS + CALL_SECONDS)
        try:
            call: Any = self._core.list_pod_for_all_namespaces
            answer = await call(**query, _preload_content=False, _request_timeout=timeout)
            async with answer:
                await _check(answer)
                async for line in _lines(answer.content):
                    yield _changed_pod(_decoded(_change, line))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiAway(f"the API server has ended a watch ({_reason(error)})") from None

    async def open_gate(self, pod: Metadata, index: int, name: str) -> None:
        """Remove the gate *name*, at *index* of the pod's gates. Raises Changed if it is not there."""
        path = f"/spec/schedulingGates/{index}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"{path}/name", "value": name},
            {"op": "remove", "path": path},
        ]
        query = {"name": pod.name, "namespace": pod.namespace, "body": patch}
        await _answer(self._core.patch_namespaced_pod, query)

    async def note(self, note: Note, number: str, instance: str) -> None:
        """Create an event. number: unique among the pod's events."""
        pod, now = note.pod, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": f"{pod.name[:200]}.{number}", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
                "resourceVersion": pod.resource_version,
            },
            "reason": note.reason, "message": note.text[:1000], "type": note.type, "count": 1,
            "firstTimestamp": now, "lastTimestamp": now,
            "source": {"component": "cachefs-scheduler"},
            "reportingComponent": "cachefs.io/scheduler", "reportingInstance": instance[:128],
        }  # fmt: skip
        await _answer(self._core.create_namespaced_event, {"namespace": pod.namespace, "body": event})

    # --- the Lease ---------------------------------------------------------------------------------------------------

    async def lease(self, name: str) -> Lease:
        """Read a Lease. Raises Changed if it does not exist."""
        query = {"name": name, "namespace": self.namespace}
        return _decoded(_lease, await _answer(self._coordination.read_namespaced_lease, query))

    async def create_lease(self, name: str, spec: LeaseSpec) -> Lease:
        """Create a Lease. Raises Changed if it exists."""
        query = {
            "namespace": self.namespace,
            "body": _lease_body(Lease({"name": name, "namespace": self.namespace}, spec)),
        }
        return _decoded(_lease, await _answer(self._coordination.create_namespaced_lease, query))

    async def replace_lease(self, lease: Lease) -> Lease:
        """Replace a Lease. Raises Changed if it has been changed since it was read."""
        query = {"name": lease.metadata["name"], "namespace": self.namespace, "body": _lease_body(lease)}
        return _decoded(_lease, await _answer(self._coordination.replace_namespaced_lease, query))


def _lease_body(lease: Lease) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": lease.metadata,
        "spec": msgspec.to_builtins(lease.spec),
    }  # fmt: skip


async def _answer(call: Any, query: Mapping[str, Any]) -> bytes:
    """Return the body of a successful response. Raises ApiAway, ApiRefuses, Changed, Expired."""
    try:
        answer: aiohttp.ClientResponse = await _in_time(
            call(**query, _preload_content=False, _request_timeout=CALL_SECONDS)
        )
        async with answer:
            await _check(answer)
            return await _whole(answer.content)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ApiAway(f"the API server does not answer ({_reason(error)})") from None


async def _in_time(call: Awaitable[_T]) -> _T:
    async with asyncio.timeout(2 * CALL_SECONDS):
        return await call


async def _whole(content: aiohttp.StreamReader) -> bytes:
    found = bytearray()
    while chunk := await content.readany():
        found += chunk
        if len(found) > _MOST_ANSWER:
            raise ApiRefuses("the API server's answer is longer than it may be")
    return bytes(found)


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    text = answer.reason or ""
    with contextlib.suppress(msgspec.DecodeError):
        text = msgspec.json.decode(await answer.content.read(1 << 16), type=_Status).message or text
    _raise_status(answer.status, text[:_MOST_TEXT])


def _raise_status(code: int, text: str) -> None:
    # 422: the `test` operation of a patch has failed.
    if code in (404, 409, 422):
        raise Changed(text)
    if code == 410:
        raise Expired(text)
    if code == 429 or code >= 500:
        raise ApiAway(f"the API server has no time ({code}: {text})")
    way_out = "; see the ClusterRole in scheduler_plugin/deploy" if code == 403 else ""
    raise ApiRefuses(f"the API server refuses it ({code}: {text}){way_out}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    while chunk := await content.readany():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MOST_LINE:
            raise ApiRefuses("the API server says of one change more than it may")
        for line in lines:
            if line.strip():
                yield line


def _changed_pod(change: _Change) -> tuple[str, Pod]:
    if change.type == "ERROR":
        status = _decoded(msgspec.json.Decoder(_Status), bytes(change.object))
        _raise_status(status.code or 500, status.message[:_MOST_TEXT])
    return change.type, _decoded(_pod, bytes(change.object))


def _decoded(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiRefuses(f"what answers is no API server: {error}") from None


def _reason(error: BaseException) -> str:
    return "not in time" if isinstance(error, asyncio.TimeoutError) else str(error)[:200] or type(error).__name__
