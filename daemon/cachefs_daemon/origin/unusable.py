"""The origin of a dataset that cannot be opened as it was added, for instance since the configuration has changed."""

from collections.abc import AsyncIterator

from cachefs.errors import CachefsError, ConfigError, remove_secrets
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, ReportProblem
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint


class UnusableOrigin:
    """Fails each request with the same reason (see cachefs_daemon.origin.base.Origin), so that the dataset's cached
    blocks stay readable, and other datasets are not affected."""

    def __init__(self, url: str, reason: CachefsError) -> None:
        self.url = url
        self.requests = 0
        self.errors = 0
        self.fallback_reads = 0
        self.endpoint = Endpoint(remove_secrets(url), 1)
        self._reason = ConfigError(f"{url} cannot be used: {reason}")

    def identity(self, key: bytes) -> bytes:
        raise self._reason

    async def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        raise self._reason
        yield

    async def read(self, wanted: ObjectRange, deadline: Deadline) -> bytes:
        self.errors += 1
        raise self._reason

    async def close(self) -> None:
        pass
