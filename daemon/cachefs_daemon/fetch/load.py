"""A block on its way through a fetch process."""

from collections.abc import Callable
from dataclasses import dataclass

from cachefs.block import Location
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.order import Order, OrderingOrigin

# Is told where the block is; or, at most once and before that, None: it should be brought in another way, and may come
# in this one all the same.
Tell = Callable[[Location | None], None]


@dataclass(slots=True, eq=False)
class Load:
    """One block."""

    source: BlockSource
    origin: OrderingOrigin
    order: Order
    tell: Tell
    # When that was asked for, in loop time.
    began: float
    # Whether it should be brought in another way by now.
    given_up: bool = False

    def give_up(self) -> None:
        """Somebody else should bring it."""
        if not self.given_up:
            self.given_up = True
            self.tell(None)
