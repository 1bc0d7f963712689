"""Combines several origins with the same objects into one: those of datasets with one URL and different options."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, cast, runtime_checkable

from cachefs.errors import ConfigError, OriginAccessDenied
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import Data, ObjectRange, Origin, PreconnectingOrigin, RangeOrigin, ReportProblem
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.s3.prepared_get import PreparedGet, PreparedGetOrigin


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
    def fallback_reads(self) -> int:
        return sum(origin.fallback_reads for origin in self._origins)

    @property
    def endpoint(self) -> Endpoint:
        return self._origins[0].endpoint

    def identity(self, key: bytes) -> bytes:
        return self._origins[0].identity(key)

    def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        return self._origins[0].list(report)

    async def read(self, wanted: ObjectRange, deadline: Deadline) -> Data:
        pause, refused = deadline.pause, None

        async def pause_unless_refused(seconds: float) -> None:
            """Fail on denied access: expired credentials may be renewed, but another origin's may be good already."""
            if isinstance(deadline.last_error, OriginAccessDenied):
                raise deadline.last_error
            await pause(seconds)

        deadline.pause = pause_unless_refused
        for origin in list(self._origins):
            try:
                return await origin.read(wanted, deadline)
            except (OriginAccessDenied, ConfigError) as error:
                refused = refused or error
                # From now on the other origins are tried first.
                self._origins.remove(origin)
                self._origins.append(origin)
        deadline.pause = pause
        if deadline.last_error is not None:
            return await self._origins[0].read(wanted, deadline)
        assert refused is not None
        raise refused

    async def close(self) -> None:
        pass


@runtime_checkable
class _FastOrigin(RangeOrigin, PreparedGetOrigin, PreconnectingOrigin, Protocol):
    """The optional abilities of origins for fast fetches."""


class AnyFastOrigin(AnyOrigin):
    """AnyOrigin of origins that all read ranges, take orders and can be prepared.

    The first origin is used. Where it refuses, `read` reads the blocks, and puts another origin first.
    """

    @property
    def _first(self) -> _FastOrigin:
        return cast(_FastOrigin, self._origins[0])

    @property
    def can_read_ranges(self) -> bool:
        return self._first.can_read_ranges

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], on_part: Callable[[int, Data], None]
    ) -> None:
        await self._first.read_parts(wanted, lengths, on_part)

    async def preconnect(self) -> None:
        await self._first.preconnect()

    def prepare_get(self, wanted: ObjectRange) -> PreparedGet | None:
        return self._first.prepare_get(wanted)

    def note_success(self, wanted: ObjectRange, seconds: float) -> None:
        self._first.note_success(wanted, seconds)

    def note_failure(self, reason: str, *, throttled: bool) -> None:
        self._first.note_failure(reason, throttled=throttled)

    def count_hedges(self, sent: int, won: int) -> None:
        self._first.count_hedges(sent, won)


def combine_origins(origins: Sequence[Origin]) -> Origin:
    """Return an origin that reads from any of *origins* and can do what all of them can; a single one itself."""
    if len(origins) == 1:
        return origins[0]
    return AnyFastOrigin(origins) if all(isinstance(origin, _FastOrigin) for origin in origins) else AnyOrigin(origins)
