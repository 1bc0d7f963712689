"""A block on its way through a fetch process."""

from collections.abc import Callable
from dataclasses import dataclass

from cachefs.block import Location
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.order import Order, OrderingOrigin

# Called with the location of the block; or, at most once and before that, with None: fetch it in another way too. The
# process may still deliver it.
Tell = Callable[[Location | None], None]


@dataclass(slots=True, eq=False)
class Load:
    """A block to be fetched by a fetch process."""

    source: BlockSource
    origin: OrderingOrigin
    order: Order
    tell: Tell
    # Called when the bytes have arrived.
    arrived: Callable[[], None]
    # Loop time of the request.
    began: float
    # Whether the block should be fetched in another way by now.
    given_up: bool = False

    def give_up(self) -> None:
        """Ask for the block to be fetched in another way."""
        if not self.given_up:
            self.given_up = True
            self.tell(None)
