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
from cachefs.extras import require_extra
from cachefs_scheduler.kube.kube_messages import ObjectMetadata, Pod, PodEvent

with require_extra("kubernetes", "cachefs-scheduler with [kube] api"):
    from kubernetes_asyncio import client, config

# Seconds that a call may take, and after which the API server ends a watch.
CALL_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 290
_PAGE: Final = 500
_MAX_PAGES: Final = 2000
_MAX_RESPONSE: Final = 256 << 20
_MAX_LINE: Final = 8 << 20
_MAX_TEXT: Final = 300
# Pods that have ended disappear from lists and watches as if they were deleted.
_LIVE_PODS: Final = "status.phase!=Succeeded,status.phase!=Failed"
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeApiUnavailable(CachefsError):
    """The API server does not respond or is overloaded; the call can be retried."""


class KubeApiRefused(CachefsError):
    """The API server refuses the call."""


class KubeObjectChanged(CachefsError):
    """The object is missing, or differs from the expected state."""


class WatchExpired(CachefsError):
    """The watch cannot resume; all pods must be listed again."""


class _ListMetadata(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion", default="")
    more: str = msgspec.field(name="continue", default="")


class _PodList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata = _ListMetadata()
    items: list[Pod] | None = None


class _WatchEvent(msgspec.Struct, frozen=True):
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
_change = msgspec.json.Decoder(_WatchEvent)
_lease = msgspec.json.Decoder(Lease)


async def connect(api_location: str, namespace: str) -> "KubeApiClient":
    """Connect to the API server. Raises ConfigError.

    Args:
        api_location: "pod", or the path of a kubeconfig file.
        namespace: namespace of the Lease; "": that of the pod or the kubeconfig.
    """
    settings = client.Configuration()
    try:
        if api_location == "pod":
            load: Any = config.load_incluster_config
            load(client_configuration=settings)
            namespace = namespace or (_ACCOUNT / "namespace").read_text().strip()
        else:
            await config.load_kube_config(config_file=api_location, client_configuration=settings)
            contexts: Any = config.list_kube_config_contexts(config_file=api_location)
            namespace = namespace or str(contexts[1]["context"].get("namespace") or "")
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"kube.api = {api_location!r}: {str(error)[:_MAX_TEXT]}") from None
    return KubeApiClient(client.ApiClient(settings), namespace or "default")


class KubeApiClient:
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
        for _ in range(_MAX_PAGES):
            query = {"limit": _PAGE, "field_selector": _LIVE_PODS} | ({"label_selector": selector} if selector else {})
            query |= {"_continue": more} if more else {}
            page = _decode(_pods, await _call(self._core.list_pod_for_all_namespaces, query))
            yield page.items or [], page.metadata.version
            if not (more := page.metadata.more):
                return
        raise KubeApiRefused(f"the API server lists more than {_MAX_PAGES * _PAGE:,} pods")

    async def watch_pods(self, selector: str, version: str) -> AsyncIterator[tuple[str, Pod]]:
        """Yield the kind (ADDED, MODIFIED, DELETED, BOOKMARK) and the pod of each change, until the server ends the
        watch. Raises WatchExpired, KubeApiUnavailable, KubeApiRefused."""
        query = {
            "watch": True, "resource_version": version, "allow_watch_bookmarks": True, "field_selector": _LIVE_PODS,
            "timeout_seconds": WATCH_SECONDS,
        } | ({"label_selector": selector} if selector else {})  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS, sock_read=WATCH_SECONDS + CALL_SECONDS)
        try:
            call: Any = self._core.list_pod_for_all_namespaces
            response = await call(**query, _preload_content=False, _request_timeout=timeout)
            async with response:
                await _check_status(response)
                async for line in _lines(response.content):
                    yield _changed_pod(_decode(_change, line))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeApiUnavailable(f"the API server has ended a watch ({_reason(error)})") from None

    async def open_gate(self, pod: ObjectMetadata, index: int, name: str) -> None:
        """Remove the gate *name*, at *index* of the pod's gates. Raises KubeObjectChanged if it is not there."""
        path = f"/spec/schedulingGates/{index}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"{path}/name", "value": name},
            {"op": "remove", "path": path},
        ]
        query = {"name": pod.name, "namespace": pod.namespace, "body": patch}
        await _call(self._core.patch_namespaced_pod, query)

    async def write_event(self, pod_event: PodEvent, number: str, instance: str) -> None:
        """Create an event. number: unique among the pod's events."""
        pod, now = pod_event.pod, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": f"{pod.name[:200]}.{number}", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
                "resourceVersion": pod.resource_version,
            },
            "reason": pod_event.reason, "message": pod_event.text[:1000], "type": pod_event.type, "count": 1,
            "firstTimestamp": now, "lastTimestamp": now,
            "source": {"component": "cachefs-scheduler"},
            "reportingComponent": "cachefs.io/scheduler", "reportingInstance": instance[:128],
        }  # fmt: skip
        await _call(self._core.create_namespaced_event, {"namespace": pod.namespace, "body": event})

    # --- the Lease ---------------------------------------------------------------------------------------------------

    async def read_lease(self, name: str) -> Lease:
        """Read a Lease. Raises KubeObjectChanged if it does not exist."""
        query = {"name": name, "namespace": self.namespace}
        return _decode(_lease, await _call(self._coordination.read_namespaced_lease, query))

    async def create_lease(self, name: str, spec: LeaseSpec) -> Lease:
        """Create a Lease. Raises KubeObjectChanged if it exists."""
        query = {
            "namespace": self.namespace,
            "body": _lease_body(Lease({"name": name, "namespace": self.namespace}, spec)),
        }
        return _decode(_lease, await _call(self._coordination.create_namespaced_lease, query))

    async def replace_lease(self, lease: Lease) -> Lease:
        """Replace a Lease. Raises KubeObjectChanged if it has been changed since it was read."""
        query = {"name": lease.metadata["name"], "namespace": self.namespace, "body": _lease_body(lease)}
        return _decode(_lease, await _call(self._coordination.replace_namespaced_lease, query))


def _lease_body(lease: Lease) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": lease.metadata,
        "spec": msgspec.to_builtins(lease.spec),
    }  # fmt: skip


async def _call(call: Any, query: Mapping[str, Any]) -> bytes:
    """Return the body of a successful response. Raises KubeApiUnavailable, KubeApiRefused, KubeObjectChanged,
    WatchExpired."""
    try:
        response: aiohttp.ClientResponse = await _with_timeout(
            call(**query, _preload_content=False, _request_timeout=CALL_SECONDS)
        )
        async with response:
            await _check_status(response)
            return await _read_body(response.content)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise KubeApiUnavailable(f"the API server does not answer ({_reason(error)})") from None


async def _with_timeout(call: Awaitable[_T]) -> _T:
    async with asyncio.timeout(2 * CALL_SECONDS):
        return await call


async def _read_body(content: aiohttp.StreamReader) -> bytes:
    found = bytearray()
    while chunk := await content.readany():
        found += chunk
        if len(found) > _MAX_RESPONSE:
            raise KubeApiRefused("the API server's response is too long")
    return bytes(found)


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = response.reason or ""
    with contextlib.suppress(msgspec.DecodeError):
        text = msgspec.json.decode(await response.content.read(1 << 16), type=_Status).message or text
    _raise_status(response.status, text[:_MAX_TEXT])


def _raise_status(code: int, text: str) -> None:
    # 422: the `test` operation of a patch has failed.
    if code in (404, 409, 422):
        raise KubeObjectChanged(text)
    if code == 410:
        raise WatchExpired(text)
    if code == 429 or code >= 500:
        raise KubeApiUnavailable(f"the API server is overloaded ({code}: {text})")
    remedy = "; see the ClusterRole in scheduler_plugin/deploy" if code == 403 else ""
    raise KubeApiRefused(f"the API server refuses the request ({code}: {text}){remedy}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    incomplete = b""
    while chunk := await content.readany():
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        if len(incomplete) > _MAX_LINE:
            raise KubeApiRefused("the API server sent a change of more than the allowed size")
        for line in lines:
            if line.strip():
                yield line


def _changed_pod(change: _WatchEvent) -> tuple[str, Pod]:
    if change.type == "ERROR":
        status = _decode(msgspec.json.Decoder(_Status), bytes(change.object))
        _raise_status(status.code or 500, status.message[:_MAX_TEXT])
    return change.type, _decode(_pod, bytes(change.object))


def _decode(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KubeApiRefused(f"the response is not that of an API server: {error}") from None


def _reason(error: BaseException) -> str:
    return (
        "no response in time" if isinstance(error, asyncio.TimeoutError) else str(error)[:200] or type(error).__name__
    )
