"""The epochs of one consumer: those with published orders, those that its sampler determines, and those in the plan."""

from collections.abc import Iterable
from typing import Final

from cachefs.planning.blocks.space import EpochReads, Samples
from cachefs.planning.sequences.sampler import EpochOrder, SamplerSpec

# Limits on orders that were published far ahead, which wait as they came: bytes, and their number.
MAX_WAITING_BYTES: Final = 64 << 20
MAX_WAITING_ORDERS: Final = 1000
# Most epochs that are shown as known: a sampler may determine a million.
MAX_SHOWN: Final = 1000


class Epochs:
    """The epochs that one consumer has published, and which of them the plan knows."""

    def __init__(self, spec: SamplerSpec | None) -> None:
        # Numbers of the epochs whose orders the sampler determines.
        self.computable = range(spec.epochs) if spec is not None and spec.kind != "explicit" else range(0)
        self.samples: Samples | None = None  # None until the samples are resolved
        self.reads: dict[
            int, EpochReads
        ] = {}  # by number: the epochs in the plan, which are the current one and the next
        self._waiting: dict[int, EpochOrder] = {}  # by epoch: published orders that are not in the plan yet
        self._published: dict[int, EpochOrder] = {}  # by epoch, from the current one on: all published orders
        self._forgotten: set[int] = set()  # epochs whose orders were published too far ahead to be kept
        self._refused: set[int] = set()  # epochs for whose orders there was no memory
        self._kept_from = 0  # all epochs before this one were over at the last `keep_from`

    def add_order(self, epoch: int, order: EpochOrder, current: int) -> bool:
        """Add the published *order* of an epoch: sample numbers, shape (samples of the epoch,), uint32. current: the
        consumer's epoch. The furthest orders are forgotten where there are too many. Returns False where that is this
        epoch."""
        self._waiting[epoch] = order
        self._published = {**self.published(current), epoch: order}
        forgotten = set()
        for orders in (self._waiting, self._published):
            while len(orders) > MAX_WAITING_ORDERS or (
                len(orders) > 2 and sum(one.nbytes for one in orders.values()) > MAX_WAITING_BYTES
            ):
                forgotten.add(max(orders))
                del orders[max(orders)]
        self._forgotten = _nearest_epochs((self._forgotten | forgotten) - {epoch}, current)
        self._refused = _nearest_epochs(self._refused - {epoch}, current)
        return epoch not in forgotten

    def refuse_order(self, epoch: int) -> None:
        """Drop the published order of this epoch, for which there is no memory."""
        self._waiting.pop(epoch, None)
        self._published.pop(epoch, None)
        self._refused.add(epoch)

    @property
    def order_bytes(self) -> int:
        """Bytes of all published orders that are kept."""
        return sum(order.nbytes for order in {**self._waiting, **self._published}.values())

    def note_lost(self, forgotten: Iterable[int], refused: Iterable[int]) -> None:
        """Record epochs whose published orders are lost: they were too far ahead, or there was no memory."""
        self._forgotten.update(forgotten)
        self._refused.update(refused)

    def forgotten(self, current: int) -> list[int]:
        """Return the epochs from *current* on whose orders were too far ahead to be kept, in ascending order."""
        return sorted(one for one in self._forgotten if one >= current and one not in self._published)

    def refused(self, current: int) -> list[int]:
        """Return the epochs from *current* on for whose orders there was no memory, in ascending order."""
        return sorted(one for one in self._refused if one >= current and one not in self._published)

    def missing_orders(self, current: int) -> list[int]:
        """Return those of *current* and the next epoch whose order is neither known nor determined by a sampler. Orders
        that were published and lost are needed once more."""
        if self.computable:
            return []
        return [one for one in (current, current + 1) if one not in self._published and one not in self.reads]

    def published(self, current: int) -> dict[int, EpochOrder]:
        """Return the published orders of epoch *current* and later, by epoch: sample numbers, shape (samples of the
        epoch,), uint32."""
        return {number: order for number, order in self._published.items() if number >= current}

    def may_be_read(self, epoch: int) -> bool:
        """Return False where the publication rules out that there is such an epoch."""
        return not self.computable or epoch in self.computable or epoch in self._waiting

    def is_last(self, epoch: int) -> bool:
        """Return whether the publication says that no epoch follows."""
        return bool(self.computable) and epoch == self.computable[-1]

    @property
    def first(self) -> int:
        """The epoch with which a consumer that has not begun will begin."""
        return 0 if self.computable else min(self._waiting, default=0)

    @property
    def longest(self) -> int:
        """Reads of the longest epoch in the plan."""
        return max((len(reads.blocks) for reads in self.reads.values()), default=0)

    @property
    def shortest(self) -> int:
        """Reads of the shortest epoch in the plan; 0 while there is none."""
        return min((len(reads.blocks) for reads in self.reads.values()), default=0)

    def next_unplanned(self, current: int) -> int | None:
        """Return an epoch that the plan should know and does not: *current* or the next."""
        if self.samples is None:
            return None
        for number in (current, current + 1):
            if number in self._waiting or (number in self.computable and number not in self.reads):
                return number
        return None

    def waiting_order(self, epoch: int) -> EpochOrder | None:
        """Return the published order of an epoch that is not in the plan yet: sample numbers, shape (samples of the
        epoch,), uint32. None where there is none."""
        return self._waiting.get(epoch)

    def mark_planned(self, epoch: int, order: EpochOrder | None) -> None:
        """Record that an epoch has entered the plan with this published order. A newer order of the epoch stays."""
        if order is not None and self._waiting.get(epoch) is order:
            del self._waiting[epoch]

    def use_samples(self, samples: Samples) -> None:
        """Compute epochs from these samples from now on."""
        self.samples = samples

    def forget_reads(self) -> None:
        """Forget the epochs of the plan."""
        self.reads = {}

    def clear(self) -> None:
        """Forget the epochs of the plan, and the samples."""
        self.samples, self.reads = None, {}

    def keep_from(self, current: int) -> None:
        """Forget the epochs before *current*, which are over, and what was published for them."""
        self.reads = {number: one for number, one in self.reads.items() if number >= current}
        self._published = self.published(current)
        if current > self._kept_from:  # an order for an earlier epoch from now on is for a consumer that goes back
            self._waiting = {number: order for number, order in self._waiting.items() if number >= current}
        self._kept_from = current

    def known_epochs(self, current: int) -> list[int]:
        """Return the next epochs from *current* on whose orders are known or can be computed: MAX_SHOWN at most."""
        return sorted({*self.computable[current : current + MAX_SHOWN], *self._waiting, *self.reads})[:MAX_SHOWN]

    def reads_to_samples(self, reads: float) -> float:
        """Convert a number of reads to samples, as far as epochs are in the plan."""
        for known in self.reads.values():
            return reads * known.samples / max(1, len(known.blocks))
        return reads


def _nearest_epochs(epochs: set[int], current: int) -> set[int]:
    """Return the epochs from *current* on: the nearest MAX_WAITING_ORDERS."""
    return set(sorted(one for one in epochs if one >= current)[:MAX_WAITING_ORDERS])
