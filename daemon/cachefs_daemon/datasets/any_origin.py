"""Combines several origins with the same objects into one: those of datasets with one URL and different options."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, cast, runtime_checkable

from cachefs.errors import ConfigError, OriginAccessDenied
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import Data, ObjectRange, Origin, PreparedOrigin, RangeOrigin, Report
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.order import Order, OrderingOrigin
from cachefs_daemon.origin.patience import Patience


class AnyOrigin:
    """Reads from the first of its origins that allows it (see cachefs_daemon.origin.base.Origin).

    Datasets with the same listing share their snapshot and their blocks, so it is unknown for which of them a block is
    read. The credentials of one may be withdrawn while those of another are good.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        """origins: at least one, in the order in which they are tried. They stay open when this one is closed."""
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
            """Fail on denied access: expired credentials may be renewed, but another origin's may be good already."""
            if isinstance(patience.trouble, OriginAccessDenied):
                raise patience.trouble
            await rest(seconds)

        patience.rest = rest_unless_refused
        for origin in list(self._origins):
            try:
                return await origin.read(wanted, patience)
            except (OriginAccessDenied, ConfigError) as error:
                refused = refused or error
                # From now on the other origins are tried first.
                self._origins.remove(origin)
                self._origins.append(origin)
        patience.rest = rest
        if patience.trouble is not None:
            return await self._origins[0].read(wanted, patience)
        assert refused is not None
        raise refused

    async def close(self) -> None:
        pass


@runtime_checkable
class _Able(RangeOrigin, OrderingOrigin, PreparedOrigin, Protocol):
    """The optional abilities of origins for fast fetches."""


class AnyAbleOrigin(AnyOrigin):
    """AnyOrigin of origins that all read ranges, take orders and can be prepared.

    The first origin is used. Where it refuses, `read` reads the blocks, and puts another origin first.
    """

    @property
    def _first(self) -> _Able:
        return cast(_Able, self._origins[0])

    @property
    def reads_ranges(self) -> bool:
        return self._first.reads_ranges

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], arrived: Callable[[int, Data], None]
    ) -> None:
        await self._first.read_parts(wanted, lengths, arrived)

    async def prepare(self) -> None:
        await self._first.prepare()

    def order(self, wanted: ObjectRange) -> Order | None:
        return self._first.order(wanted)

    def brought(self, wanted: ObjectRange, seconds: float) -> None:
        self._first.brought(wanted, seconds)

    def not_brought(self, reason: str, *, throttled: bool) -> None:
        self._first.not_brought(reason, throttled=throttled)

    def hedged(self, sent: int, won: int) -> None:
        self._first.hedged(sent, won)


def any_of(origins: Sequence[Origin]) -> Origin:
    """Return an origin that reads from any of *origins* and can do what all of them can; a single one itself."""
    if len(origins) == 1:
        return origins[0]
    return AnyAbleOrigin(origins) if all(isinstance(one, _Able) for one in origins) else AnyOrigin(origins)
