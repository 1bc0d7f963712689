"""What the helper knows of one consumer: its samples' files, given or learned, and its orders."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy

from cachefs.errors import ConfigError
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.publishing.learned import LearnedFiles
from cachefs.publishing.places import Places
from cachefs.publishing.shares import Order, Share, shares

# Bytes that the orders of one consumer may have that are still to be read: of ten epochs of ten million samples.
MOST_ORDER_BYTES: Final = 400 << 20


class Opening(msgspec.Struct, frozen=True):
    """What a training process says first of a consumer. Fields without a comment mean what they mean in JobPublish."""

    # Number of the consumer on the page that the training process and the helper share.
    slot: int
    # Name of the consumer.
    name: str
    source: str
    # Samples of the dataset; 0 where only the files tell.
    length: int
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    # Which file each sample is has still to be learned from what is opened.
    learn: bool = False
    # The samples are all files below this directory, in order of their path bytes.
    tree: str = ""
    # The samples are the records of the files (JobPublish.map.indexer).
    indexer: str = ""
    # The directory that relative paths start from.
    cwd: str = "/"


@dataclass(slots=True)
class PublishedConsumer:
    """One consumer, and how much of it the daemon knows.

    It has more attributes than most classes: they are the state of one conversation, which Reporter goes on with.
    """

    opening: Opening
    # One share per snapshot, with the consumer's files in it, once they are known.
    shares: list[Share] = field(default_factory=list)
    # The order of all epochs, where it can be computed.
    spec: SamplerSpec | None = None
    # The orders of single epochs, of the current one and of later ones.
    orders: dict[int, Order] = field(default_factory=dict)
    # Where the consumer is: the epoch, and how many of the epoch's samples were delivered.
    epoch: int = 0
    position: int = 0
    # Does the daemon know the files?
    published: bool = False
    # Has the daemon refused the consumer?
    failed: bool = False
    # When the daemon, which had no room for the consumer, is asked again (monotonic seconds).
    quiet_until: float = 0.0
    # (index of the share, epoch) of the orders that the daemon knows.
    reported: set[tuple[int, int]] = field(default_factory=set)
    # When the consumer ends (monotonic seconds), unless it opens again before; None where it is open.
    closing: float | None = None
    # When the daemon was last told its position (monotonic seconds).
    reported_at: float = 0.0
    # The samples' files, where they have to be learned.
    learned: LearnedFiles = field(init=False)
    # How many samples were learned when `shares` was made of them.
    _resolved: int = 0
    _first_epoch: int | None = None

    def set_files(self, files: Sequence[str]) -> None:
        """The file of each sample. Raises OSError."""
        absolute = [path if path.startswith("/") else os.path.join(self.opening.cwd, path) for path in files]
        self._take(shares(absolute, Places(), max(self.opening.length, len(files))))

    def __post_init__(self) -> None:
        self.learned = LearnedFiles(self.opening.length if self.opening.learn else 0)

    def learn(self, pairs: list[tuple[int, list[str]]], places: Places) -> None:
        """pairs: samples, each with the absolute paths that were opened for it."""
        for sample, paths in pairs:
            self.learned.learn(sample, paths, places)

    def reopen(self) -> None:
        """A new loader of the same samples goes on with what the last one has learned."""
        self.closing = None
        self.orders.clear()
        self.reported.clear()
        self._first_epoch = self.epoch = -1

    def resolve_learned(self) -> bool:
        """Make shares of what was learned, where that is worth it: all files are known, or an epoch has gone by.

        True where the daemon should be told.
        """
        known = self.learned.count
        epoch_gone_by = self._first_epoch is not None and self.epoch > self._first_epoch
        worth_it = self.learned.is_full or (epoch_gone_by and known > 1.05 * self._resolved)
        if not worth_it or known <= self._resolved:
            return False
        self._take(self.learned.shares())
        self._resolved = known
        return True

    @property
    def has_order(self) -> bool:
        return self.spec is not None or bool(self.orders)

    def set_order(self, epoch: int, order: Order) -> None:
        """Raises ConfigError where the orders of too many epochs are published beforehand."""
        others = sum(known.nbytes for number, known in self.orders.items() if number != epoch)
        if others and others + order.nbytes > MOST_ORDER_BYTES:
            raise ConfigError(
                f"the order of epoch {epoch} of consumer {self.opening.name} is not kept, as those of other epochs have"
                f" {others >> 20} MiB; publish each epoch as it begins"
            )
        self._begin(epoch)
        if self.spec is not None:
            # The spec is no longer right, and the daemon has to forget it.
            self.spec = None
            self.published = False
        self.orders[epoch] = order
        self.reported = {(share, known) for share, known in self.reported if known != epoch}

    def set_spec(self, spec: SamplerSpec, epoch: int) -> None:
        self._begin(epoch)
        self.spec = spec
        self.orders.clear()
        self.reported.clear()

    def _begin(self, epoch: int) -> None:
        if self._first_epoch is None:
            self._first_epoch = self.epoch = epoch

    def move(self, epoch: int, position: int) -> bool:
        """The consumer is at this place now. True where it was at another place before."""
        if (epoch, position) == (self.epoch, self.position):
            return False
        self.epoch, self.position = epoch, position
        for old in [known for known in self.orders if known < epoch]:
            del self.orders[old]
        return True

    def order(self, epoch: int) -> Order | None:
        """The samples of *epoch*, in order; None where they are not known. Raises ConfigError for a senseless spec."""
        if epoch not in self.orders and self.spec is not None and epoch < self.spec.epochs:
            self.orders[epoch] = epoch_order(self.spec, epoch)
        return self.orders.get(epoch)

    def spec_for(self, share: Share) -> SamplerSpec | None:
        """The spec from which the daemon can compute the orders of *share*. There is none where the share's files are
        not the samples one by one."""
        return self.spec if share.is_plain else None

    def unreported(self, number: int) -> list[int]:
        """Epochs whose order of share *number* the daemon needs now, and does not know."""
        if self.spec_for(self.shares[number]) is not None:
            return []
        known = {self.epoch, self.epoch + 1} if self.spec is not None else set(self.orders)
        return sorted(epoch for epoch in known if epoch >= self.epoch and (number, epoch) not in self.reported)

    def position_in(self, share: Share) -> int:
        """How many files of *share* belong to the samples that were delivered in this epoch. Raises ConfigError."""
        if share.is_plain:
            return self.position
        order = self.order(self.epoch)
        return 0 if order is None else share.position(order, self.position)

    def _take(self, found: Sequence[Share]) -> None:
        if self.opening.indexer:
            found = [dataclasses.replace(share, of_records=True) for share in found]
        # The largest share comes first, and is published under the consumer's own name.
        self.shares = sorted(found, key=lambda share: -len(share.entries))
        self.published = False
        self.reported.clear()


def order_of(bulk: bytes) -> Order:
    """The order in a message: sample numbers, shape (n,), uint32."""
    return numpy.frombuffer(bulk, dtype="<u4")


def spec_of(fields: dict[str, Any]) -> SamplerSpec:
    """The spec in a message. Raises msgspec.ValidationError, ConfigError."""
    spec = msgspec.convert(fields, SamplerSpec)
    spec.check()
    return spec
