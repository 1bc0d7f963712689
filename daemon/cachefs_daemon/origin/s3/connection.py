"""Clients of S3 servers: one for all datasets with the same server and options, open only while it is used.

Each client has its own connections, and reads credentials once. The description of the S3 protocol, which takes 100 ms
and 14 MiB, is loaded in a thread and once per process; with it, a client takes 8 ms and 0.2 MiB.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import botocore.handlers
import botocore.loaders
import botocore.session
import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ProfileNotFound

from cachefs.backoff import Backoff
from cachefs.errors import ConfigError, has_secrets
from cachefs.messages import OriginOptions
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.outage import Outage
from cachefs_daemon.origin.request_counters import count_current_request
from cachefs_daemon.origin.s3.credentials import with_timeout
from cachefs_daemon.origin.s3.get import S3Get
from cachefs_daemon.origin.s3.page import parse_time
from cachefs_daemon.origin.s3.route import register_capture

log = logging.getLogger(__name__)

# Rejected responses in a row after which our client is not used; and for how many seconds at first, and at most.
_FAILURES_TO_SWITCH: Final = 16
_SHORTEST: Final = 1.0
_LONGEST: Final = 300.0
# Seconds between two log lines.
_LOG_SECONDS: Final = 3600.0
# Seconds after its last request when a client is closed.
IDLE_SECONDS: Final = 300.0
# Seconds between two searches for other credentials, since some come from a server or a program.
RENEW_SECONDS: Final = 1.0
# The key of the unparsed body in a response to ListObjectsV2.
RAW_PAGE: Final = "RawPage"


class FallbackState:
    """The circuit breaker from our own client to aiobotocore, the fallback client, and its log lines, for one server.

    Each response that our client rejects costs a second request. If a server sends nothing else, our client is not used
    for a while. Used on the event loop.
    """

    def __init__(self, name: str) -> None:
        """name: of the origin, for people."""
        self._name = name
        self._consecutive = 0
        self._total = 0
        self._backoff = Backoff(_SHORTEST, _LONGEST)  # in monotonic seconds; without failures, the fallback is off
        self._logged_at = -math.inf  # monotonic seconds

    @property
    def is_active(self) -> bool:
        """Whether the fallback client is to be used."""
        return not self._backoff.is_due(time.monotonic())

    def note_accepted(self) -> None:
        """Record a response that our client accepted."""
        self._consecutive = 0
        self._backoff.reset()

    def note_rejected(self, reason: str) -> None:
        """Record a response that our client rejected, or a request that it could not send."""
        now = time.monotonic()
        self._consecutive += 1
        self._total += 1
        if self._consecutive >= _FAILURES_TO_SWITCH and self._backoff.is_due(now):
            self._backoff.note_failure(now)
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.warning(
                "%s: %s; such objects are read through aiobotocore, which takes more processor time (%d so far)",
                self._name, reason, self._total,
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class OpenClient:
    """A pair of clients, aiobotocore's and our own, with their credentials."""

    # aiobotocore's client.
    botocore_client: Any
    # Our own client, which only gets objects.
    own_client: S3Get
    # Access key and session token in use; None without credentials.
    credentials: tuple[str, str | None] | None
    # Closes the client.
    stack: contextlib.AsyncExitStack
    # The loop that the connections belong to.
    loop: asyncio.AbstractEventLoop
    # Requests in flight.
    users: int = 0
    # Loop time of the last request's end, fetch processes included.
    used: float = 0.0
    # Another client has replaced this one.
    is_retired: bool = False


class S3Connection:
    """The access to one S3 server with one set of options. Used on the event loop."""

    def __init__(self, options: OriginOptions, settings: OriginSettings) -> None:
        self.endpoint_url = (
            options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )
        if has_secrets(self.endpoint_url or ""):
            raise ConfigError(
                "the S3 endpoint must be a URL without a user and a signature, since every user of this node can see it"
            )
        name = f"S3 at {self.endpoint_url or 'AWS'}"
        self.outage = Outage(name)
        self.fallback = FallbackState(name)
        self.server = Endpoint(
            name, settings.max_connections, hedge_share=settings.hedge_share, largest=settings.max_request
        )
        self._options = options
        self._settings = settings
        self._origin_count = 0
        self._opening = asyncio.Lock()
        self._renewing = asyncio.Lock()
        self._current: OpenClient | None = None
        self._searched_at = float("-inf")  # monotonic time of the last search for other credentials
        self._idle: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def current(self) -> OpenClient | None:
        """The client that is open on this loop, if any."""
        current = self._current
        return current if current is not None and current.loop is asyncio.get_running_loop() else None

    def client(self) -> "_ClientLease":
        """Return a context manager with a client, for one request. It raises ConfigError."""
        return _ClientLease(self)

    async def acquire_client(self) -> OpenClient:
        """Return a client, opening one if necessary (see `client`)."""
        current = self._current
        if current is None or self._opening.locked() or not current.loop.is_running():
            current = await self._open()
        current.users += 1
        return current

    def release_client(self, client: OpenClient) -> None:
        """Return a client that was taken."""
        client.users -= 1
        if not client.users:
            self._note_unused(client)

    def touch(self) -> None:
        """Mark the client as used: a fetch process that uses its prepared GETs got a response."""
        if (current := self.current) is not None:
            current.used = current.loop.time()

    async def renew_credentials(self, refused: OpenClient) -> bool:
        """Search for other credentials than those of the client *refused*. Return whether the next client has any."""
        # `_opening` is not held: a provider may take long, and other requests may have valid credentials.
        async with self._renewing:
            current = self._current
            if current is None or current is not refused:
                return True
            if time.monotonic() - self._searched_at < RENEW_SECONDS or self._options.anonymous:
                return False
            self._searched_at = time.monotonic()
            try:
                found = await _credentials_of(await self._session())
            except BotoCoreError:
                return False  # a program may be writing them right now
            if found == current.credentials:
                return False
            if self._current is current:
                self._detach_client()
            return True

    def add_origin(self) -> None:
        """Register one more origin that uses this connection."""
        self._origin_count += 1

    async def remove_origin(self) -> None:
        """Unregister an origin. The last one closes the client."""
        self._origin_count -= 1
        if not self._origin_count:
            self._detach_client()
            await asyncio.gather(*self._closing, return_exceptions=True)

    async def _open(self) -> OpenClient:
        async with self._opening:
            if self._current is None or not self._current.loop.is_running():
                self._detach_client()
                self._current = await self._connect()
            return self._current

    def _note_unused(self, current: OpenClient) -> None:
        if current.is_retired:
            task = current.loop.create_task(current.stack.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        else:
            current.used = current.loop.time()
            if self._idle is None:
                self._idle = current.loop.call_later(IDLE_SECONDS, self._close_if_idle, current)

    def _close_if_idle(self, current: OpenClient) -> None:
        """Close the client once it is idle. One timer checks this: setting one after each request would take 2 us."""
        self._idle = None
        if current.users:
            return  # the last of them sets the timer again
        if current.loop.time() >= current.used + IDLE_SECONDS:
            self._detach_client()
        else:
            self._idle = current.loop.call_at(current.used + IDLE_SECONDS, self._close_if_idle, current)

    def _detach_client(self) -> None:
        """Detach the client, so that the next request opens another one."""
        current, self._current = self._current, None
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if current is not None:
            current.is_retired = True
            if not current.users and current.loop.is_running():
                self._note_unused(current)

    async def _session(self) -> AioSession:
        session = AioSession(profile=self._options.profile)
        loader = await asyncio.get_running_loop().run_in_executor(None, _load_protocol)
        session.register_component("data_loader", loader)
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
        return session

    async def _connect(self) -> OpenClient:
        try:
            session = await self._session()
            credentials = None if self._options.anonymous else await _credentials_of(session)
            made = session.create_client(
                "s3",
                region_name=self._options.region or session.get_config_variable("region") or "us-east-1",
                endpoint_url=self.endpoint_url,
                config=self._config(),
            )
            stack = contextlib.AsyncExitStack()
            full = await stack.enter_async_context(made)
        except ProfileNotFound as error:
            raise ConfigError(f"{error}; check --profile and ~/.aws of the user that the daemon runs as") from error
        except ValueError as error:
            if self.endpoint_url and not self.endpoint_url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"S3 endpoint {self.endpoint_url!r} must begin with http:// or https://, as in http://127.0.0.1:9000"
                ) from error
            raise ConfigError(f"{self.endpoint_url or 'AWS'} cannot be reached as configured: {error}") from error
        register_capture(full)
        full.meta.events.register("before-parse.s3.ListObjectsV2", _keep_raw_page)
        full.meta.events.register("before-send.s3", count_current_request)
        if self._options.requester_pays:
            full.meta.events.register("before-parameter-build.s3", _let_requester_pay)
        # This handler would parse each page before us. `parse_page` itself detects an error with status 200.
        with contextlib.suppress(AttributeError, ValueError):
            full.meta.events.unregister("before-parse.s3.*", botocore.handlers._handle_200_error)
        source = None if self._options.anonymous else await session.get_credentials()
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", True)
        lean = S3Get(full, source, self._settings, verify, self.server)
        stack.callback(lean.close)
        return OpenClient(full, lean, credentials, stack, asyncio.get_running_loop())

    def _config(self) -> AioConfig:
        # Servers other than AWS seldom support bucket names in host names.
        style = self._options.addressing_style or ("path" if self.endpoint_url else "auto")
        return AioConfig(
            max_pool_connections=self._settings.max_connections,
            connect_timeout=self._settings.connect_timeout,
            read_timeout=self._settings.read_timeout,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": style},
            signature_version=UNSIGNED if self._options.anonymous else None,
            # Some servers send the whole object's checksum with a range of it, which fails botocore's own check.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )


class _ClientLease:
    """One use of a client. A generator as context manager would take twice as long, 2 us of each read."""

    __slots__ = ("_client", "_connection")

    def __init__(self, connection: S3Connection) -> None:
        self._connection = connection
        self._client: OpenClient | None = None

    async def __aenter__(self) -> OpenClient:
        self._client = await self._connection.acquire_client()
        return self._client

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None
        self._connection.release_client(self._client)


_shared: Final[WeakValueDictionary[tuple[OriginOptions, OriginSettings], S3Connection]] = WeakValueDictionary()


def shared_connection(options: OriginOptions, settings: OriginSettings) -> S3Connection:
    """Return the connection that all origins with these options and settings share. Call its `add_origin` and
    `remove_origin`."""
    key = msgspec.structs.replace(options, mtime_only=False), settings
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = S3Connection(options, settings)
    return found


async def _credentials_of(session: AioSession) -> tuple[str, str | None] | None:
    found = await with_timeout(session.get_credentials())
    if found is None:
        return None
    frozen = await with_timeout(found.get_frozen_credentials())
    return frozen.access_key, frozen.token


def _let_requester_pay(params: dict[str, Any], model: Any, **_: Any) -> None:
    """Let the requester pay. Our own client copies the header from the request that route.py captures."""
    if "RequestPayer" in model.input_shape.members:
        params["RequestPayer"] = "requester"


def _keep_raw_page(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Keep the unparsed page: botocore scans a page of keys twice, and takes three times as long as `parse_page`."""
    if response_dict["status_code"] == 200:
        customized_response_dict[RAW_PAGE] = response_dict["body"]
        response_dict["body"] = b"<ListBucketResult/>"


@functools.cache
def _load_protocol() -> Any:
    """Load the description of the S3 protocol. Call it in a thread."""
    loader = botocore.loaders.create_loader(os.environ.get("AWS_DATA_PATH"))
    with contextlib.suppress(BotoCoreError, ValueError):
        session = botocore.session.Session()
        session.register_component("data_loader", loader)
        # Making a client loads all that other clients need.
        session.create_client("s3", region_name="us-east-1", aws_access_key_id="-", aws_secret_access_key="-")
    return loader
