"""The helper's state of one consumer: the files of its samples, given or learned, and its orders."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy

from cachefs.errors import ConfigError
from cachefs.mount_table import MountPoint
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.publishing.compared import Compared
from cachefs.publishing.inference import PART_WRONG, Inference, Observed
from cachefs.publishing.learned import MOST_SAMPLES, LearnedFiles, file_at
from cachefs.publishing.notes import (
    Unexplained,
    Unknown,
    known_words,
    learned_words,
    loader_name,
    shards_words,
    unsettled_words,
    words,
)
from cachefs.publishing.page import Need
from cachefs.publishing.places import Places
from cachefs.publishing.rule import Column, Rule
from cachefs.publishing.shares import Order, Share, no_files, shares
from cachefs.publishing.tally import NO_TALLY, Tally

# Maximum size in bytes of the orders of one consumer that are still to be read: ten epochs of ten million samples.
MOST_ORDER_BYTES: Final = 400 << 20
# Number of mistakes in listed or learned files after which none are published: they may change in each epoch.
MOST_MISTAKES: Final = 2
# Initial pause in seconds before the daemon is asked what is wrong.
LOOK_SECONDS: Final = 3.0


class Opening(msgspec.Struct, frozen=True):
    """A training process's first message about a consumer. Fields without a comment mean the same as in JobPublish."""

    # Number of the consumer on the page that the training process and the helper share.
    slot: int
    # Name of the consumer.
    name: str
    source: str
    # Number of samples of the dataset; 0 where only the files tell.
    length: int
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    # Whether the samples' files have to be learned from the files that are opened.
    learn: bool = False
    # Whether opened files will be reported, so that the given files can be compared with them.
    compare: bool = False
    # The samples are all files below this directory, in order of their path bytes.
    tree: str = ""
    # Whether a sample is a shard, with many of the loader's samples.
    shards: bool = False
    # The samples are the records of the files (JobPublish.map.indexer).
    indexer: str = ""
    # The directory that relative paths start from.
    cwd: str = "/"
    # Names of the classes of the loader's dataset and sampler, to name the loader to the user.
    dataset: str = ""
    sampler: str = ""
    # The line of the job's code that made the loader, and the number of epochs in the program's arguments; else "", 0.
    place: str = ""
    planned: int = 0
    # Number of the loader in its process: a loader that is made anew for each epoch keeps its number.
    number: int = 0
    # A file that the loader opened, where nothing else is known of its reads.
    opened: str = ""


@dataclass(slots=True)
class PublishedConsumer:
    """One consumer, and how much of it the daemon knows."""

    opening: Opening
    # One share per snapshot, with the consumer's files in it, once they are known.
    shares: list[Share] = field(default_factory=list)
    # The order of all epochs, where it can be computed.
    spec: SamplerSpec | None = None
    # The orders of single epochs, of the current one and of later ones.
    orders: dict[int, Order] = field(default_factory=dict)
    # For epochs that are only parts of one of the job: its number, and how many of its samples come before.
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Where the consumer is: the epoch, and how many of the epoch's samples were delivered.
    epoch: int = 0
    position: int = 0
    # Whether the daemon knows the files.
    published: bool = False
    # Whether the daemon has rejected the consumer.
    failed: bool = False
    # When to publish again after the daemon had no room for the consumer (monotonic seconds).
    quiet_until: float = 0.0
    # (index of the share, epoch) of the orders that the daemon knows.
    reported: set[tuple[int, int]] = field(default_factory=set)
    # When the consumer ends (monotonic seconds), unless it opens again before; None where it is open.
    closing: float | None = None
    # When the position was last reported (monotonic seconds).
    reported_at: float = 0.0
    # Pause in seconds before the daemon is asked what is wrong, while the consumer stands still.
    pause: float = LOOK_SECONDS
    # Last reported: note, epoch that the current one is a part of, tally, and whether files are being learned.
    told: tuple[str, tuple[int, int] | None, Tally, bool] = ("", None, NO_TALLY, False)
    # What the loader has delivered, and how long that took.
    tally: Tally = NO_TALLY
    # Whether the user was told what is understood of the loader, or what is not.
    has_said: bool = False
    # The learned files of the samples.
    learned: LearnedFiles = field(init=False)
    # Whether only opened files tell which files the samples are.
    is_learning: bool = field(init=False)
    # Number of samples: more than in `opening` where the dataset and its sampler have no `__len__`.
    _length: int = field(init=False)
    # The search for a rule that gives the files of all samples.
    inference: Inference | None = None
    # Whether the daemon has to forget the files, which were wrong.
    is_wrong: bool = False
    _rule: Rule | None = None  # source of `shares`
    _compared: Compared = field(default_factory=Compared)
    # How often listed or learned files were wrong.
    _mistakes: int = 0
    # What the training process reports as unknown.
    _unknown: Unknown | None = None
    _unexplained: Unexplained = field(default_factory=Unexplained)
    # A file that the loader opened: its mount, and its inode number.
    _opened: tuple[MountPoint, int] | None = None
    # Number of learned samples when `shares` was made of them.
    _resolved: int = 0
    _first_epoch: int | None = None

    def set_files(self, files: Sequence[str]) -> None:
        """Set the file of each sample. Raises OSError."""
        absolute = [path if path.startswith("/") else os.path.join(self.opening.cwd, path) for path in files]
        self._take(shares(absolute, Places(), max(self._length, len(files))))

    def __post_init__(self) -> None:
        self._length = self.opening.length
        self.is_learning = self.opening.learn
        self.learned = LearnedFiles(self._length if self.opening.learn else 0)

    @property
    def need(self) -> Need:
        """The samples whose opened files should be reported."""
        if self._is_asking:
            return Need.UNKNOWN
        return Need.SOME if self.opening.compare and not self._is_given_up else Need.NONE

    @property
    def _is_asking(self) -> bool:
        """Whether the files of some samples are unknown."""
        return self.is_learning and self._rule is None and not self.learned.is_full

    @property
    def _is_given_up(self) -> bool:
        return self._mistakes >= MOST_MISTAKES

    def set_columns(self, columns: Sequence[Column]) -> None:
        """Set the columns of the dataset, from which to infer the samples' files."""
        if self.is_learning and self._rule is None:
            self.inference = Inference(columns, self._length)

    def observe(self, observed: Observed, places: Places) -> None:
        """Record the files that were opened for some samples."""
        if not self.is_learning or self._rule is None:
            self._compare(observed, places)
        if not self.is_learning:
            return
        if self.inference is not None:
            self.inference.observe(observed)
        self._unexplained.observe(observed.samples, observed.paths)
        if self._opened is None and observed.paths:
            self._opened = file_at(observed.paths[0], places)
        each, rest = divmod(len(observed.paths), max(1, len(observed.samples)))
        if observed.in_order and each and not rest:
            # Files can be matched with the samples of a batch only where all have equally many.
            for number, sample in enumerate(observed.samples):
                paths = dict.fromkeys(observed.paths[number * each : (number + 1) * each])
                self.learned.learn(sample, list(paths), places)

    def _compare(self, observed: Observed, places: Places) -> None:
        if not self.opening.compare or not self.shares or self.is_wrong:
            return
        files = [file for path in observed.paths if (file := file_at(path, places)) is not None]
        self._compared.observe(observed, [inode for _, inode in files], self.shares)
        if self._compared.is_wrong:
            self.is_wrong = True
            self.is_learning = True
            self._mistakes += 1
            self._compared = Compared()
            self.learned = LearnedFiles(0 if self._is_given_up else self._length)

    def infer(self, places: Places) -> None:
        """Make shares of the inferred rule, or have them forgotten where the rule was retracted."""
        if self.inference is None:
            return
        while (rule := self.inference.rule) is not self._rule:
            self._rule = rule
            if rule is None:
                self.is_wrong = bool(self.shares)
                break
            files = rule.files(self.inference.columns, self._length)
            try:
                found = shares(files, places, self._length)
            except OSError:
                found = []  # a directory that the user may not read
            # A rule is wrong where its files do not exist.
            if sum(len(share.entries) for share in found) < (1 - PART_WRONG) * sum(map(len, files)):
                self.inference.reject()
            else:
                self._take(found)
        if self.inference.is_wrong:
            self.inference = None

    @property
    def is_to_be_resolved(self) -> bool:
        """Whether a rule was found or retracted since the last `infer`."""
        return self.is_wrong or (self.inference is not None and self.inference.rule is not self._rule)

    def forget(self) -> None:
        """Drop the files, which the daemon has forgotten."""
        self.shares, self.published, self.is_wrong, self._resolved = [], False, False, 0
        self.reported.clear()

    def reopen(self) -> None:
        """Continue with a new loader of the same samples, and keep what was learned."""
        self.closing = None
        self.orders.clear()
        self.reported.clear()
        self._first_epoch = self.epoch = -1

    @property
    def has_begun(self) -> bool:
        """Whether the consumer is in an epoch. A loader that was made anew is in none until it names its epoch."""
        return self.epoch >= 0

    def resolve_learned(self) -> bool:
        """Make shares of the learned files, once all are known or an epoch has passed. Return whether there are any."""
        if not self.is_learning or self._rule is not None:
            return False
        known = self.learned.count
        epoch_gone_by = self._first_epoch is not None and self.epoch > self._first_epoch
        worth_it = self.learned.is_full or (epoch_gone_by and known > 1.05 * self._resolved)
        if not worth_it or known <= self._resolved:
            return False
        self._take(self.learned.shares())
        self._resolved = known
        return True

    # --- what is not understood -----------------------------------------------------------------------------------

    def set_unknown(self, unknown: str, opened: str = "") -> None:
        """Set what the training process does not understand of the consumer; "" where it understands all. opened: a
        file that the consumer reads, where the training process itself tells the user. Raises ValueError."""
        self.has_said = self.has_said or bool(opened)
        self._unknown = Unknown(unknown) if unknown else None
        if opened and self._opened is None:
            self._opened = file_at(opened, Places())

    @property
    def note(self) -> str:
        """The user's line on what is not understood; "" where all is, or no read from a mount is known."""
        unknown = (self._unexplained.unknown if self._lacks_files else None) or self._unknown
        if unknown is None or (self._lacks_files and self._opened is None):
            return ""
        return words(unknown, self.opening.dataset, self.opening.sampler, self.opening.place)

    @property
    def loader(self) -> str:
        """The name of the consumer's loader; "" where it has no loader of torch."""
        return loader_name(self.opening.dataset, self.opening.place) if self.opening.dataset else ""

    @property
    def line(self) -> str:
        """The user's line on what is understood; "" while that is unknown, or where `note` tells it."""
        if not self.loader or self.note or self._lacks_files:
            return ""
        order = self.orders.get(self.epoch) if self.opening.shards else None
        if order is not None:
            return shards_words(self.loader, len(order), max(1, self.tally.epochs))
        if not self._knows_the_epoch:
            return ""
        if self.is_learning and self._rule is None:
            return learned_words(self.loader, max(2, self.tally.epochs))
        tally = self.tally
        return known_words(self.loader, tally.epoch_length, tally.epochs, by_rule=self._rule is not None)

    @property
    def last_line(self) -> str:
        """The line for the end of the consumer: `note` or `line`, or that a loader was not understood in time."""
        return self.note or self.line or (unsettled_words(self.loader) if self.loader and self.tally.samples else "")

    @property
    def _knows_the_epoch(self) -> bool:
        """Whether the order of the whole current epoch is published, not parts of it as they are drawn."""
        order, length = self.orders.get(self.epoch), self.tally.epoch_length
        _, begins = self.parts.get(self.epoch, (-1, 0))
        if self.spec is not None:
            return length > 0
        # The rest of a resumed epoch is published at once. The last one of several parts reaches the end, too.
        return order is not None and 0 < length <= begins + len(order) and 2 * len(order) > length

    @property
    def _lacks_files(self) -> bool:
        return not any(len(share.entries) for share in self.shares)

    @property
    def was_learned(self) -> bool:
        """Whether only opened files tell which files the samples are."""
        return self.is_learning and self._rule is None

    @property
    def is_shown_learning(self) -> bool:
        """Whether the daemon knows the consumer, but its files are still being learned."""
        return self.is_learning and self._lacks_files and not self._is_given_up

    def show(self) -> None:
        """Let the daemon know a consumer that reads unknown files from a mount, by a share without files."""
        if not self.shares and self._opened is not None and (self.note or self.is_learning):
            mount, inode = self._opened
            self.shares = [no_files(mount, inode)]

    @property
    def has_order(self) -> bool:
        return self.spec is not None or bool(self.orders)

    def set_order(self, epoch: int, order: Order, part: tuple[int, int] | None = None) -> None:
        """Set an epoch's order. Raises ConfigError where too many orders are published ahead. part: see `parts`."""
        others = sum(known.nbytes for number, known in self.orders.items() if number != epoch)
        if others and others + order.nbytes > MOST_ORDER_BYTES:
            raise ConfigError(
                f"the order of epoch {epoch} of consumer {self.opening.name} is not kept, as those of other epochs have"
                f" {others >> 20} MiB; publish each epoch as it begins"
            )
        self._begin(epoch)
        if self.spec is not None:
            # The daemon has to forget the spec, which is no longer right.
            self.spec = None
            self.published = False
        self.orders[epoch] = order
        if self.opening.learn and len(order) and self._length <= (last := int(order.max())) < MOST_SAMPLES:
            self._grow(last + 1)
        if part is not None:
            self.parts[epoch] = part
        self.reported = {(share, known) for share, known in self.reported if known != epoch}

    def _grow(self, length: int) -> None:
        """Set a larger number of samples than was known. The files of the new samples are still to be learned."""
        self._length = length
        if not self._is_given_up:
            self.learned.grow(length)
        if self.inference is not None:
            self.inference.grow(length)
            self._rule = None  # `infer` makes its shares anew

    def set_spec(self, spec: SamplerSpec, epoch: int) -> None:
        self._begin(epoch)
        self.spec = spec
        self.orders.clear()
        self.parts.clear()
        self.reported.clear()

    def _begin(self, epoch: int) -> None:
        if self._first_epoch is None:
            self._first_epoch = self.epoch = epoch

    def move(self, epoch: int, position: int) -> bool:
        """Set the consumer's position. Return whether it has changed."""
        if (epoch, position) == (self.epoch, self.position):
            return False
        self.epoch, self.position = epoch, position
        for of_epochs in (self.orders, self.parts):
            for old in [known for known in of_epochs if known < epoch]:
                del of_epochs[old]
        return True

    def order(self, epoch: int) -> Order | None:
        """Return the samples of *epoch* in order; None if unknown. Raises ConfigError for an invalid spec."""
        if epoch not in self.orders and self.spec is not None and epoch < self.spec.epochs:
            self.orders[epoch] = epoch_order(self.spec, epoch)
        return self.orders.get(epoch)

    def spec_for(self, share: Share) -> SamplerSpec | None:
        """Return the spec for the orders of *share*; None where its files are not the samples one by one."""
        return self.spec if share.is_plain else None

    def unreported(self, number: int) -> list[int]:
        """Return the epochs whose order of share *number* the daemon needs now, and does not know."""
        if self.spec_for(self.shares[number]) is not None or self._lacks_files:
            return []
        known = {self.epoch, self.epoch + 1} if self.spec is not None else set(self.orders)
        return sorted(epoch for epoch in known if epoch >= self.epoch and (number, epoch) not in self.reported)

    def position_in(self, share: Share) -> int:
        """Return how many files of *share* belong to the samples delivered in this epoch. Raises ConfigError."""
        if share.is_plain:
            return self.position
        order = self.order(self.epoch)
        return 0 if order is None else share.position(order, self.position)

    def part_in(self, share: Share) -> tuple[int, int]:
        """Return the epoch of the job that the current epoch is a part of, and about how many files of *share* come
        before it there; (-1, 0) where it is no part."""
        epoch, begins = self.parts.get(self.epoch, (-1, 0))
        return epoch, begins if share.is_plain else begins * len(share.samples) // max(1, share.length)

    def _take(self, found: Sequence[Share]) -> None:
        if self.opening.indexer:
            found = [dataclasses.replace(share, of_records=True) for share in found]
        # The largest share is published under the consumer's own name.
        self.shares = sorted(found, key=lambda share: -len(share.entries))
        self.published = False
        self.reported.clear()


def order_of(bulk: bytes) -> Order:
    """Return the order in a message: sample numbers, shape (n,), uint32."""
    return numpy.frombuffer(bulk, dtype="<u4")


def part_of(message: dict[str, Any]) -> tuple[int, int] | None:
    """Return the epoch of the job that an order in a message is a part of, and how many of its samples come before."""
    part = message.get("part")
    return None if part is None else (int(part[0]), int(part[1]))


def spec_of(fields: dict[str, Any]) -> SamplerSpec:
    """Return the spec in a message. Raises msgspec.ValidationError, ConfigError."""
    spec = msgspec.convert(fields, SamplerSpec)
    spec.check()
    return spec
