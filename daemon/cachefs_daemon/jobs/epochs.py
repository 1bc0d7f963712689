"""The epochs of one consumer: those whose orders it has published, those its sampler determines, and
those in the plan."""

from collections.abc import Iterable
from typing import Final

from cachefs.planning.blocks.samples import Reads, Samples
from cachefs.planning.sequences.sampler import Order, SamplerSpec

# Epochs that were published far ahead wait as they came, and no more than this of them: in bytes, and how many.
MAX_WAITING: Final = 64 << 20
MOST_WAITING: Final = 1000
# Epochs that are shown as known, at most: a sampler may determine a million.
SHOWN: Final = 1000


class Epochs:
    """What one consumer has published of its epochs, and how much of it the plan knows by now."""

    def __init__(self, spec: SamplerSpec | None) -> None:
        # Numbers of the epochs whose orders the sampler determines.
        self.computable = range(spec.epochs) if spec is not None and spec.kind != "explicit" else range(0)
        self.samples: Samples | None = None  # what its samples are; None while that is found out
        self.reads: dict[int, Reads] = {}  # by number: the epochs in the plan, which are the current one and the next
        self._waiting: dict[int, Order] = {}  # by epoch: orders that were published and are not in the plan yet
        self._published: dict[int, Order] = {}  # by epoch, from the current one on: all orders that were published
        self._forgotten: set[int] = set()  # epochs whose orders were published too far ahead to be kept
        self._refused: set[int] = set()  # epochs for whose orders there was no memory
        self._begins = 0  # the epoch before which all were over when the plan was last brought on

    def add(self, epoch: int, order: Order, current: int) -> bool:
        """The *order* of an epoch was published: sample numbers, shape (samples of the epoch,), uint32. current: the
        consumer's epoch. What is too far ahead to be kept is forgotten: the nearest epochs matter. False where that is
        this very epoch."""
        self._waiting[epoch] = order
        self._published = {**self.published(current), epoch: order}
        forgotten = set()
        for orders in (self._waiting, self._published):
            while len(orders) > MOST_WAITING or (
                len(orders) > 2 and sum(one.nbytes for one in orders.values()) > MAX_WAITING
            ):
                forgotten.add(max(orders))
                del orders[max(orders)]
        self._forgotten = _nearest((self._forgotten | forgotten) - {epoch}, current)
        self._refused = _nearest(self._refused - {epoch}, current)
        return epoch not in forgotten

    def refuse(self, epoch: int) -> None:
        """There is no memory for the order of this epoch, which was published."""
        self._waiting.pop(epoch, None)
        self._published.pop(epoch, None)
        self._refused.add(epoch)

    @property
    def order_bytes(self) -> int:
        """Bytes of all orders that are kept as they were published."""
        return sum(order.nbytes for order in {**self._waiting, **self._published}.values())

    def lose(self, forgotten: Iterable[int], refused: Iterable[int]) -> None:
        """Orders of these epochs were published once and are known no more: too far ahead, or without memory."""
        self._forgotten.update(forgotten)
        self._refused.update(refused)

    def forgotten(self, current: int) -> list[int]:
        """The epochs from *current* on whose orders were published too far ahead to be kept, in ascending order."""
        return sorted(one for one in self._forgotten if one >= current and one not in self._published)

    def refused(self, current: int) -> list[int]:
        """The epochs from *current* on for whose orders there was no memory, in ascending order."""
        return sorted(one for one in self._refused if one >= current and one not in self._published)

    def wanted(self, current: int) -> list[int]:
        """Which of *current* and the next epoch nobody knows, where no sampler determines them. If their orders were
        published, they have to be once more."""
        if self.computable:
            return []
        return [one for one in (current, current + 1) if one not in self._published and one not in self.reads]

    def published(self, current: int) -> dict[int, Order]:
        """The orders that were published, by epoch, of epoch *current* and later ones: sample numbers, shape (samples
        of the epoch,), uint32."""
        return {number: order for number, order in self._published.items() if number >= current}

    def may_be_read(self, epoch: int) -> bool:
        """What was published does not say that there is no such epoch."""
        return not self.computable or epoch in self.computable or epoch in self._waiting

    def is_last(self, epoch: int) -> bool:
        """What was published says that no epoch follows."""
        return bool(self.computable) and epoch == self.computable[-1]

    @property
    def first(self) -> int:
        """The epoch that a consumer which has not begun will begin with."""
        return 0 if self.computable else min(self._waiting, default=0)

    @property
    def longest(self) -> int:
        """Reads of the longest epoch in the plan."""
        return max((len(reads.blocks) for reads in self.reads.values()), default=0)

    @property
    def shortest(self) -> int:
        """Reads of the shortest epoch in the plan; 0 while there is none."""
        return min((len(reads.blocks) for reads in self.reads.values()), default=0)

    def missing(self, current: int) -> int | None:
        """An epoch that the plan should know and does not: *current* or the next."""
        if self.samples is None:
            return None
        for number in (current, current + 1):
            if number in self._waiting or (number in self.computable and number not in self.reads):
                return number
        return None

    def waiting(self, epoch: int) -> Order | None:
        """The published order of an epoch that is not in the plan yet: sample numbers, shape (samples of the epoch,),
        uint32. None where there is none."""
        return self._waiting.get(epoch)

    def taken(self, epoch: int, order: Order | None) -> None:
        """An epoch is brought into the plan, with this published order. It may have got another one meanwhile."""
        if order is not None and self._waiting.get(epoch) is order:
            del self._waiting[epoch]

    def forget_reads(self) -> None:
        """No epoch is in the plan any more, and nobody knows what the samples are."""
        self.samples, self.reads = None, {}

    def keep_from(self, current: int) -> None:
        """The epochs before *current* are over, and what was published for them is of no use."""
        self.reads = {number: one for number, one in self.reads.items() if number >= current}
        self._published = self.published(current)
        if current > self._begins:  # what an earlier epoch gets from now on is for a consumer that goes back
            self._waiting = {number: order for number, order in self._waiting.items() if number >= current}
        self._begins = current

    def known(self, current: int) -> list[int]:
        """Numbers of the next epochs from *current* on whose orders are known, or can be computed: SHOWN at most."""
        return sorted({*self.computable[current : current + SHOWN], *self._waiting, *self.reads})[:SHOWN]

    def in_samples(self, reads: float) -> float:
        """A number of reads in samples, as far as epochs are in the plan."""
        for known in self.reads.values():
            return reads * known.samples / max(1, len(known.blocks))
        return reads


def _nearest(epochs: set[int], current: int) -> set[int]:
    """Those of the epochs that follow *current*, and it: MOST_WAITING at most."""
    return set(sorted(one for one in epochs if one >= current)[:MOST_WAITING])
