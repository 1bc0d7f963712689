"""A block on its way through a fetch process."""

from collections.abc import Callable
from dataclasses import dataclass

from cachefs.block import BlockLocation
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.prepared_get import PreparedGet, PreparedGetOrigin

# Called with the location of the block; or, at most once and before that, with None: fetch it in another way too. The
# process may still deliver it.
ProcessResultCallback = Callable[[BlockLocation | None], None]


@dataclass(slots=True, eq=False)
class ProcessFetch:
    """A block to be fetched by a fetch process."""

    source: BlockSource
    origin: PreparedGetOrigin
    prepared_get: PreparedGet
    on_result: ProcessResultCallback
    # Called when the bytes have arrived.
    on_arrival: Callable[[], None]
    # Loop time of the request.
    started_at: float
    # Whether the block should be fetched in another way by now.
    is_given_up: bool = False

    def give_up(self) -> None:
        """Ask for the block to be fetched in another way."""
        if not self.is_given_up:
            self.is_given_up = True
            self.on_result(None)
