"""Current credentials, refreshed beside the reads that use them.

A provider may be a program or a server that hangs or fails for a while. botocore renews credentials ten minutes before
they expire, so that credentials read a moment ago are valid, and no read waits for new ones.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, Final, Protocol, TypeVar

from botocore.exceptions import CredentialRetrievalError

from cachefs_daemon.origin.http.tls import retrieve_exception

# Least seconds between two reads of the credentials.
FRESH_SECONDS: Final = 1.0
# Seconds since the last successful read for which requests do not wait for a slow provider.
_VALID_SECONDS: Final = 240.0
# Timeout of a provider in seconds. A role or a single sign-on takes several requests.
_TIMEOUT: Final = 20.0

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class CredentialSource(Protocol):
    """A source of credentials, as aiobotocore's session finds it, which renews them itself."""

    async def get_frozen_credentials(self) -> Any: ...


class CurrentCredentials:
    """The credentials of one source. Used on one event loop."""

    def __init__(self, source: CredentialSource | None) -> None:
        """source: None for unsigned requests."""
        self.frozen: Any = None  # as of the last read
        self._source = source
        self._refresh_task: asyncio.Task[None] | None = None
        self._refresh_began = float("-inf")  # monotonic time at which the last read began
        self._refreshed_at = float("-inf")  # monotonic time at which the last successful read ended
        self._is_failing = False  # the last read has failed

    @property
    def is_refresh_due(self) -> bool:
        now = time.monotonic()
        return now - self._refresh_began >= FRESH_SECONDS or now - self._refreshed_at >= _VALID_SECONDS

    async def refresh(self) -> None:
        """Read the credentials again, and wait for them if none are known. Raises what the source raises."""
        if self._source is None:
            self._refresh_began = self._refreshed_at = time.monotonic()
            return
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_began = time.monotonic()
            self._refresh_task = asyncio.create_task(self._read_source(self._source))
            self._refresh_task.add_done_callback(retrieve_exception)
            await asyncio.sleep(0)  # most sources answer at once
        if self._refresh_task.done() or time.monotonic() - self._refreshed_at >= _VALID_SECONDS:
            await self._wait_for_refresh(self._refresh_task)

    def close(self) -> None:
        """Stop reading."""
        if self._refresh_task is not None:
            self._refresh_task.cancel()

    async def _wait_for_refresh(self, looking: "asyncio.Task[None]") -> None:
        try:
            await asyncio.shield(looking)
        # the provider may be any program; `_read_source` logs it, and it is raised once no credentials are known
        except Exception:
            if time.monotonic() - self._refreshed_at >= _VALID_SECONDS:
                raise

    async def _read_source(self, source: CredentialSource) -> None:
        try:
            self.frozen = await with_timeout(source.get_frozen_credentials())
        except Exception as error:  # logged, and raised again
            if not self._is_failing and self.frozen is not None:
                log.warning("S3 credentials cannot be renewed, and those known are used until they end: %s", error)
            self._is_failing = True
            raise
        if self._is_failing and self._refreshed_at > float("-inf"):
            log.info("S3 credentials are renewed again")
        self._is_failing, self._refreshed_at = False, time.monotonic()


async def with_timeout(provider: Awaitable[Result]) -> Result:
    """Return a provider's answer. Raises CredentialRetrievalError if it is late or invalid."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await provider
    except TimeoutError:
        reason = f"no answer within {_TIMEOUT:g} seconds"
    except (ValueError, LookupError, OSError) as error:  # output of a program, or its failure to run
        reason = f"{type(error).__name__}: {error}"
    raise CredentialRetrievalError(provider="the configured provider", error_msg=reason)
