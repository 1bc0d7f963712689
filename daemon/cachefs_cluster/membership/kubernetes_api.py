"""Calls to a Kubernetes API server about Leases (coordination.k8s.io/v1), as a pod makes them.

The token is read again for each call, since the kubelet replaces it every hour or so, and the CA when its file changes.
"""

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from cachefs.errors import CachefsError, ConfigError
from cachefs.pem_files import FileStamps, PemFiles

log = logging.getLogger(__name__)

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Leases per page of a list; with 1,000 nodes a list has two pages.
_PAGE: Final = 500
# Seconds after which the server ends a watch. By default it would after half an hour to an hour.
_WATCH_SECONDS: Final = 280
_MAX_LINE: Final = 8 << 20
_MAX_PAGES: Final = 100

Lease = dict[str, Any]


class LeaseApiUnavailable(CachefsError):
    """The API server does not answer, or is overloaded."""


class LeaseApiRefused(CachefsError):
    """The API server answered, and refused the call."""


class LeaseConflict(CachefsError):
    """Another client has changed, made or removed the Lease."""


class LeaseNotFound(CachefsError):
    """There is no such Lease."""


class LeaseWatchExpired(CachefsError):
    """A watch cannot continue from its version: all Leases must be listed again."""


@dataclass(frozen=True, slots=True)
class LeaseApiSettings:
    """The address of the API server, and the pod's account."""

    # Such as https://10.96.0.1:443.
    url: str
    namespace: str
    # A directory with `token` and `ca.crt`.
    account: Path = ACCOUNT


def pod_settings(namespace: str, account: Path = ACCOUNT) -> LeaseApiSettings:
    """Return the settings of the pod that this process runs in. namespace: "" for the pod's own.

    Raises ConfigError outside of a pod, and in one without a service account.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            'cluster.membership = "kubernetes": this daemon does not run in a Kubernetes pod (the environment has '
            "no KUBERNETES_SERVICE_HOST); run it in one, or use etcd or a static list"
        )
    try:
        namespace = namespace or (account / "namespace").read_text().strip()
        (account / "token").read_bytes()
    except OSError as error:
        raise ConfigError(
            f'cluster.membership = "kubernetes": {error.filename}: {error.strerror}; give the pod a service account '
            "(automountServiceAccountToken)"
        ) from None
    return LeaseApiSettings(f"https://{f'[{host}]' if ':' in host else host}:{port}", namespace, account)


class LeaseApi:
    """A client of the API server. Used on one event loop."""

    def __init__(self, settings: LeaseApiSettings, timeout: float) -> None:
        """timeout: seconds that a call may take. Raises ConfigError if the certificate of the CA cannot be read."""
        self._settings = settings
        self._timeout = timeout
        self._leases = f"{settings.url}/apis/coordination.k8s.io/v1/namespaces/{settings.namespace}/leases"
        # The CA of a cluster is replaced while pods run: it is read again when its file changes.
        self._files = PemFiles(ca=settings.account / "ca.crt", names=("", "", "the API server's CA"))
        self._files_state: FileStamps = ()
        self._context: ssl.SSLContext | bool = True
        if settings.url.startswith("https://"):
            self._files_state, self._context = self._files.stamps, self._files.client_context()
        self._session = aiohttp.ClientSession(read_bufsize=1 << 18)

    async def get(self, name: str) -> Lease:
        return await self._call("GET", name)

    async def create(self, lease: Lease) -> Lease:
        return await self._call("POST", "", lease)

    async def update(self, lease: Lease) -> Lease:
        """Replace a Lease. Raises LeaseConflict if its resourceVersion differs from the server's."""
        return await self._call("PUT", lease["metadata"]["name"], lease)

    async def delete(self, name: str, version: str) -> None:
        """Delete a Lease. Raises LeaseConflict if its resourceVersion differs from the server's."""
        await self._call("DELETE", name, {"preconditions": {"resourceVersion": version}})

    async def list(self, selector: str) -> tuple[list[Lease], str]:
        """Return all Leases with a label, and the version from which to watch."""
        found: list[Lease] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            page = await self._call("GET", "", query=query)
            metadata = page.get("metadata") or {}
            found += page.get("items") or []
            if not (more := metadata.get("continue")):
                return found, str(metadata.get("resourceVersion", ""))
            query = {**query, "continue": more}
        raise LeaseApiRefused(f"the API server lists more than {_MAX_PAGES * _PAGE:,} Leases")

    async def watch(self, selector: str, version: str, silence: float) -> AsyncIterator[tuple[str, Lease]]:
        """Yield kind (ADDED, MODIFIED, DELETED, BOOKMARK) and Lease of each change.

        Ends when the server ends the watch. silence: seconds without a change after which LeaseApiUnavailable is
        raised. Raises LeaseWatchExpired.
        """
        query = {
            "labelSelector": selector, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=silence)
        try:
            async with self._session.get(
                self._leases, params=query, headers=self._headers(), timeout=timeout, ssl=self._newest_context()
            ) as response:
                await self._check_status(response)
                async for kind, change in _read_changes(response.content):
                    if kind == "ERROR":
                        _raise_status(int(change.get("code") or 0), str(change.get("message", "")))
                    yield kind, change
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LeaseApiUnavailable(f"the API server has ended a watch ({_reason(error)})") from None

    async def close(self) -> None:
        await self._session.close()

    async def _call(
        self, method: str, name: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        url = f"{self._leases}/{name}" if name else self._leases
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        try:
            async with self._session.request(
                method, url, params=query, json=body, headers=self._headers(), timeout=timeout,
                ssl=self._newest_context(),
            ) as response:  # fmt: skip
                await self._check_status(response)
                found = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LeaseApiUnavailable(
                f"the API server at {self._settings.url} does not answer ({_reason(error)})"
            ) from None
        except ValueError as error:
            raise LeaseApiRefused(
                f"{self._settings.url} sent an invalid response; is it an API server? {error}"
            ) from None
        if not isinstance(found, dict):
            raise LeaseApiRefused(
                f"{self._settings.url} sent an invalid response; is it an API server? It sent no JSON object"
            )
        return found

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        if response.status >= 400:
            try:
                status = json.loads(await response.content.read(1 << 16))
                text = str(status.get("message", ""))
            except (ValueError, AttributeError):
                text = response.reason or ""
            _raise_status(response.status, text)

    def _newest_context(self) -> ssl.SSLContext | bool:
        """Return the context that checks the API server's certificate. An invalid file leaves the former one in use."""
        if self._files_state and (state := self._files.stamps) != self._files_state:
            self._files_state = state
            try:
                self._context = self._files.client_context()
            except ConfigError as error:
                log.warning("%s; the former one stays in use", error)
        return self._context

    def _headers(self) -> dict[str, str]:
        try:
            token = (self._settings.account / "token").read_text().strip()
        except (OSError, ValueError) as error:
            raise LeaseApiRefused(f"{self._settings.account / 'token'} cannot be read: {error}") from None
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


def _raise_status(code: int, text: str) -> None:
    """Raise the error for a status of the server."""
    if code == 404:
        raise LeaseNotFound(text)
    if code == 409:
        raise LeaseConflict(text)
    if code == 410:
        raise LeaseWatchExpired(text)
    if code == 429 or code >= 500:
        raise LeaseApiUnavailable(f"the API server is overloaded ({code}: {text[:200]})")
    remedy = ""
    if code == 403:
        remedy = "; its role needs get, list, watch, create, update and delete for leases of coordination.k8s.io"
    raise LeaseApiRefused(f"the API server refuses this pod's service account ({code}: {text[:200]}){remedy}")


async def _read_changes(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Lease]]:
    """Yield kind and object of each line."""
    incomplete = b""
    while chunk := await content.readany():
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        if len(incomplete) > _MAX_LINE:
            raise LeaseApiRefused("the API server sent a change of more than the allowed size")
        for line in lines:
            if not line.strip():
                continue
            try:
                change = json.loads(line)
                yield str(change["type"]), dict(change["object"])
            except (ValueError, KeyError, TypeError):
                raise LeaseApiRefused("the API server sent an invalid message on a watch") from None


def _reason(error: BaseException) -> str:
    return (
        "no response in time" if isinstance(error, asyncio.TimeoutError) else str(error)[:200] or type(error).__name__
    )
