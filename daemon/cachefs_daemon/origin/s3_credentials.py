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

from cachefs_daemon.origin.http_tls import noticed

# Least seconds between two reads of the credentials.
FRESH: Final = 1.0
# Seconds since the last successful read for which requests do not wait for a slow provider.
_KNOWN: Final = 240.0
# Timeout of a provider in seconds. A role or a single sign-on takes several requests.
_LONGEST: Final = 20.0

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Credentials(Protocol):
    """A source of credentials, as aiobotocore's session finds it, which renews them itself."""

    async def get_frozen_credentials(self) -> Any: ...


class CurrentCredentials:
    """The credentials of one source. Used on one event loop."""

    def __init__(self, source: Credentials | None) -> None:
        """source: None for unsigned requests."""
        self.frozen: Any = None  # as of the last read
        self._source = source
        self._looking: asyncio.Task[None] | None = None
        self._began = float("-inf")  # monotonic time at which the last read began
        self._looked = float("-inf")  # monotonic time at which the last successful read ended
        self._fails = False  # the last read has failed

    @property
    def is_look_due(self) -> bool:
        now = time.monotonic()
        return now - self._began >= FRESH or now - self._looked >= _KNOWN

    async def look(self) -> None:
        """Read the credentials again, and wait for them if none are known. Raises what the source raises."""
        if self._source is None:
            self._began = self._looked = time.monotonic()
            return
        if self._looking is None or self._looking.done():
            self._began = time.monotonic()
            self._looking = asyncio.create_task(self._look(self._source))
            self._looking.add_done_callback(noticed)
            await asyncio.sleep(0)  # most sources answer at once
        if self._looking.done() or time.monotonic() - self._looked >= _KNOWN:
            await self._result(self._looking)

    def close(self) -> None:
        """Stop reading."""
        if self._looking is not None:
            self._looking.cancel()

    async def _result(self, looking: "asyncio.Task[None]") -> None:
        try:
            await asyncio.shield(looking)
        # the provider may be any program; `_look` logs it, and it is raised once no credentials are known
        except Exception:
            if time.monotonic() - self._looked >= _KNOWN:
                raise

    async def _look(self, source: Credentials) -> None:
        try:
            self.frozen = await in_time(source.get_frozen_credentials())
        except Exception as error:  # logged, and raised again
            if not self._fails and self.frozen is not None:
                log.warning("S3 credentials cannot be renewed, and those known are used until they end: %s", error)
            self._fails = True
            raise
        if self._fails and self._looked > float("-inf"):
            log.info("S3 credentials are renewed again")
        self._fails, self._looked = False, time.monotonic()


async def in_time(asked: Awaitable[Result]) -> Result:
    """Return a provider's answer. Raises CredentialRetrievalError if it is late or invalid."""
    try:
        async with asyncio.timeout(_LONGEST):
            return await asked
    except TimeoutError:
        said = f"no answer within {_LONGEST:g} seconds"
    except (ValueError, LookupError, OSError) as error:  # output of a program, or its failure to run
        said = f"{type(error).__name__}: {error}"
    raise CredentialRetrievalError(provider="the configured provider", error_msg=said)
