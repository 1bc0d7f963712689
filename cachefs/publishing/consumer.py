"""What the helper knows of one consumer: its samples' files, given or learned, and its orders."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy

from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.publishing.places import Places
from cachefs.publishing.shares import Order, Share, shares


class Opening(msgspec.Struct, frozen=True):
    """What a training process says of a consumer first.

    length: samples of the dataset, 0 where only the files tell; learn: which files they are is still to be seen; tree:
    the files are all those below this directory, in order of their path bytes; indexer: the samples are the records
    of the files; cwd: what relative paths start from.
    """

    slot: int
    name: str
    source: str
    length: int
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    learn: bool = False
    tree: str = ""
    indexer: str = ""
    cwd: str = "/"


@dataclass(slots=True)
class Consumer:
    """shares: its files by dataset, once they are known; orders: explicit ones by epoch, the current and later ones;
    told: what the daemon has been told already, as (share, epoch); published: it knows the files; closing: monotonic
    time at which the consumer is through, unless it opens again before; failed: the daemon refuses it."""

    opening: Opening
    shares: list[Share] = field(default_factory=list)
    spec: SamplerSpec | None = None
    orders: dict[int, Order] = field(default_factory=dict)
    epoch: int = 0
    position: int = 0
    published: bool = False
    failed: bool = False
    told: set[tuple[int, int]] = field(default_factory=set)
    closing: float | None = None
    heard: float = 0.0
    _learned: dict[int, list[str]] = field(default_factory=dict)
    _resolved: int = 0
    _first_epoch: int | None = None

    def set_files(self, files: Sequence[str]) -> None:
        """Raises OSError."""
        self._resolve([path if path.startswith("/") else os.path.join(self.opening.cwd, path) for path in files])

    def learn(self, pairs: list[tuple[int, list[str]]]) -> None:
        """Samples, and the absolute paths that were opened for each."""
        for sample, paths in pairs:
            if 0 <= sample < self.opening.length:
                self._learned.setdefault(sample, paths)

    def reopen(self) -> None:
        """A new loader of the same samples goes on where the last one ended."""
        self.closing = None
        self.orders.clear()
        self.told.clear()
        self._first_epoch = self.epoch = -1

    @property
    def is_learned(self) -> bool:
        return len(self._learned) == self.opening.length

    def resolve_learned(self) -> bool:
        """Make shares of what was learned, where that is worth it: all there is to learn is known, or an epoch has gone
        by. True where there is news for the daemon. Raises OSError."""
        known = len(self._learned)
        epoch_gone_by = self._first_epoch is not None and self.epoch > self._first_epoch
        worth_it = self.is_learned or (epoch_gone_by and known > 1.05 * self._resolved)
        if not worth_it or known <= self._resolved:
            return False
        self._resolve([self._learned.get(sample, []) for sample in range(self.opening.length)])
        self._resolved = known
        return True

    @property
    def has_order(self) -> bool:
        return self.spec is not None or bool(self.orders)

    def set_order(self, epoch: int, order: Order) -> None:
        self._begin(epoch)
        if self.spec is not None:
            # It holds no longer, and the daemon is to forget it.
            self.spec = None
            self.published = False
        self.orders[epoch] = order
        self.told = {(share, told) for share, told in self.told if told != epoch}

    def set_spec(self, spec: SamplerSpec, epoch: int) -> None:
        self._begin(epoch)
        self.spec = spec
        self.orders.clear()
        self.told.clear()

    def _begin(self, epoch: int) -> None:
        if self._first_epoch is None:
            self._first_epoch = self.epoch = epoch

    def move(self, epoch: int, position: int) -> bool:
        """The consumer is at this place now. True where that is news."""
        if (epoch, position) == (self.epoch, self.position):
            return False
        self.epoch, self.position = epoch, position
        for old in [known for known in self.orders if known < epoch]:
            del self.orders[old]
        return True

    def order(self, epoch: int) -> Order | None:
        """Raises ConfigError for a spec that makes no sense."""
        if epoch not in self.orders and self.spec is not None and epoch < self.spec.epochs:
            self.orders[epoch] = epoch_order(self.spec, epoch)
        return self.orders.get(epoch)

    def takes_spec(self, share: Share) -> SamplerSpec | None:
        """The spec the daemon can compute with: not where it is told of files that are not the samples one by one."""
        return self.spec if share.is_plain else None

    def untold(self, number: int) -> list[int]:
        """Epochs whose order of share *number* the daemon needs now, and was not told."""
        if self.takes_spec(self.shares[number]) is not None:
            return []
        known = {self.epoch, self.epoch + 1} if self.spec is not None else set(self.orders)
        return sorted(epoch for epoch in known if epoch >= self.epoch and (number, epoch) not in self.told)

    def position_in(self, share: Share) -> int:
        """Raises ConfigError."""
        if share.is_plain:
            return self.position
        order = self.order(self.epoch)
        return 0 if order is None else share.position(order, self.position)

    def _resolve(self, files: Sequence[str | list[str]]) -> None:
        length = max(self.opening.length, len(files))
        found = shares(files, Places(), length)
        if self.opening.indexer:
            found = [dataclasses.replace(share, of_records=True) for share in found]
        # The largest first: it is called what the consumer is called.
        self.shares = sorted(found, key=lambda share: -len(share.entries))
        self.published = False
        self.told.clear()


def as_order(bulk: bytes) -> Order:
    return numpy.frombuffer(bulk, dtype="<u4")


def spec_of(fields: dict[str, Any]) -> SamplerSpec:
    """Raises msgspec.ValidationError."""
    return msgspec.convert(fields, SamplerSpec)
