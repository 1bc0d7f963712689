"""One origin out of several that have the same objects: those of datasets with one URL and different options."""

from collections.abc import AsyncIterator, Sequence

from cachefs.errors import ConfigError, OriginAccessDenied
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import Data, ObjectRange, Origin, Report
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.patience import Patience


class AnyOrigin:
    """Reads as the first of its origins that may (see cachefs_daemon.origin.base.Origin).

    Datasets with the same listing share their snapshot and their blocks, so nobody knows for which of them a block is
    read. The credentials of one may be withdrawn while those of another are good.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        """origins: in which order they are tried; at least one. They stay open when this one is closed."""
        self._origins = list(origins)

    @property
    def url(self) -> str:
        return self._origins[0].url

    @property
    def requests(self) -> int:
        return sum(origin.requests for origin in self._origins)

    @property
    def errors(self) -> int:
        return sum(origin.errors for origin in self._origins)

    @property
    def detours(self) -> int:
        return sum(origin.detours for origin in self._origins)

    @property
    def endpoint(self) -> Endpoint:
        return self._origins[0].endpoint

    def identity(self, key: bytes) -> bytes:
        return self._origins[0].identity(key)

    def list(self, report: Report) -> AsyncIterator[list[ListedObject]]:
        return self._origins[0].list(report)

    async def read(self, wanted: ObjectRange, patience: Patience) -> Data:
        rest, refused = patience.rest, None

        async def rest_unless_refused(seconds: float) -> None:
            """Expired credentials may be renewed in time, but others may be good already."""
            if isinstance(patience.trouble, OriginAccessDenied):
                raise patience.trouble
            await rest(seconds)

        patience.rest = rest_unless_refused
        for origin in list(self._origins):
            try:
                return await origin.read(wanted, patience)
            except (OriginAccessDenied, ConfigError) as error:
                refused = refused or error
                # The others come first from now on.
                self._origins.remove(origin)
                self._origins.append(origin)
        patience.rest = rest
        if patience.trouble is not None:
            return await self._origins[0].read(wanted, patience)
        assert refused is not None
        raise refused

    async def close(self) -> None:
        pass
