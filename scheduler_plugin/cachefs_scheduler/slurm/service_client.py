"""Client of cachefs-scheduler's HTTP API, over a Unix socket or TLS."""

import ssl
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from cachefs.errors import CachefsError
from cachefs.pem_files import PemFiles
from cachefs.scheduling_messages import (
    ADMISSIONS_PATH,
    ADMIT_PATH,
    ENDED_PATH,
    KNOWN_PATH,
    NODES_PATH,
    PLACED_PATH,
    RESIZED_PATH,
    JobAdmission,
    JobAdmissions,
    JobEndReport,
    KnownJobs,
    NodesStatus,
    PlacementReport,
    PlacementRequest,
)
from cachefs_scheduler.certificates import ReloadedTlsContext
from cachefs_scheduler.slurm.config import ServiceAddressSection

_SETTINGS: Final = ("service.tls_cert", "service.tls_key", "service.tls_ca")
_CALL_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 40.0  # the service answers a long poll within 25 s
_MAX_BYTES: Final = 256 << 20
# Statuses that the next call would get too: authentication, overload, or a replica that does not lead.
_STATUSES_OF_ALL_CALLS: Final = (401, 403, 408, 429)
_Message = TypeVar("_Message", bound=msgspec.Struct)


class CallRefused(CachefsError):
    """The service refuses this call, or failed; it may accept the next one."""


class ServiceClient:
    """Calls cachefs-scheduler. All calls raise CachefsError if the service does not answer, or refuses."""

    def __init__(self, section: ServiceAddressSection) -> None:
        """Raises ConfigError for unusable certificates."""
        self._address = section.address
        files = PemFiles(section.tls_cert, section.tls_key, section.tls_ca, _SETTINGS)
        is_secure = section.address.startswith("https:")
        self._certificates = ReloadedTlsContext(files, PemFiles.client_context) if is_secure else None
        self._session = _session(section)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def fetch_nodes(self) -> NodesStatus:
        """Return the contents of each node."""
        return await self._call("GET", NODES_PATH, NodesStatus)

    async def fetch_admissions(self, after: int | None) -> JobAdmissions:
        """Return the admissions of all waiting jobs. after: a version; waits for a change, up to 25 s."""
        query = "" if after is None else f"?{urlencode({'after': after})}"
        return await self._call("GET", ADMISSIONS_PATH + query, JobAdmissions, seconds=_POLL_SECONDS)

    async def request_admission(self, request: PlacementRequest) -> JobAdmission:
        """Ask whether a job may start."""
        return await self._call("POST", ADMIT_PATH, JobAdmission, request)

    async def report_placed(self, placed: PlacementReport) -> None:
        """Report the nodes of a job."""
        await self._call("POST", PLACED_PATH, None, placed)

    async def report_resized(self, placed: PlacementReport) -> None:
        """Report changed nodes of a job."""
        await self._call("POST", RESIZED_PATH, None, placed)

    async def report_ended(self, job: str) -> None:
        """Report that a job has ended."""
        await self._call("POST", ENDED_PATH, None, JobEndReport(job))

    async def fetch_known_jobs(self, prefix: str) -> list[str]:
        """Return known jobs that have not ended and whose names begin with *prefix*."""
        return (await self._call("GET", f"{KNOWN_PATH}?{urlencode({'prefix': prefix})}", KnownJobs)).jobs

    async def _call(
        self, method: str, path: str, response_type: type[_Message] | None, body: msgspec.Struct | None = None,
        seconds: float = _CALL_SECONDS,
    ) -> _Message:  # fmt: skip
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                method, path, data=data, headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(seconds),
                ssl=self._certificates.current_context() if self._certificates is not None else True,
            ) as response:  # fmt: skip
                text = await _read_bounded(response.content)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError) as error:
            raise CachefsError(f"cachefs-scheduler at {self._address} does not answer: {error or 'too late'}") from None
        if status >= 300:
            words = " ".join(text[:1000].decode(errors="replace").split())
            is_this_one = 400 <= status <= 500 and status not in _STATUSES_OF_ALL_CALLS
            kind = CallRefused if is_this_one else CachefsError
            raise kind(f"cachefs-scheduler answers {path} with {status}: {words[:300]}")
        if response_type is None:
            return msgspec.Struct()  # type: ignore[return-value]
        try:
            return msgspec.json.decode(text, type=response_type)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise CachefsError(f"cachefs-scheduler's answer to {path} is not understood: {error}") from None


async def _read_bounded(content: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_chunked(1 << 18):
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise CachefsError(f"a response of cachefs-scheduler has more than {_MAX_BYTES >> 20} MiB")
    return b"".join(parts)


def _session(section: ServiceAddressSection) -> aiohttp.ClientSession:
    if section.address.startswith("unix:"):
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(section.address.removeprefix("unix:"), limit=8)
        return aiohttp.ClientSession("http://cachefs-scheduler", connector=connector)
    return aiohttp.ClientSession(section.address, connector=aiohttp.TCPConnector(limit=8))
