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
from cachefs.publishing.diagnostics import (
    UnexplainedFiles,
    UnknownProperty,
    known_text,
    learned_text,
    loader_name,
    shards_text,
    unknown_text,
    unsettled_text,
)
from cachefs.publishing.files.inference import MAX_WRONG_PART, OpenedFiles, RuleInference
from cachefs.publishing.files.learned import MAX_SAMPLES, FileComparison, LearnedFiles, find_file
from cachefs.publishing.files.rule import DatasetColumn, FileRule
from cachefs.publishing.files.shares import FileShare, OrderArray, empty_share, find_shares
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import NO_COUNTS, LoaderCounts, WantedSamples

# Maximum size in bytes of the orders of one consumer that are still to be read: ten epochs of ten million samples.
MAX_ORDER_BYTES: Final = 400 << 20
# Number of mistakes in listed or learned files after which none are published: they may change in each epoch.
MAX_MISTAKES: Final = 2
# Initial pause in seconds before the daemon is asked what is wrong.
FIRST_CHECK_SECONDS: Final = 3.0


class ConsumerOpening(msgspec.Struct, frozen=True):
    """A training process's first message about a consumer. Fields without a comment mean the same as in
    JobPublication."""

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
    # The samples are the records of the files (JobPublication.map.indexer).
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

    opening: ConsumerOpening
    # One share per snapshot, with the consumer's files in it, once they are known.
    shares: list[FileShare] = field(default_factory=list)
    # The order of all epochs, where it can be computed.
    spec: SamplerSpec | None = None
    # The orders of single epochs, of the current one and of later ones.
    orders: dict[int, OrderArray] = field(default_factory=dict)
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
    retry_at: float = 0.0
    # (index of the share, epoch) of the orders that the daemon knows.
    reported_orders: set[tuple[int, int]] = field(default_factory=set)
    # When the consumer ends (monotonic seconds), unless it opens again before; None where it is open.
    closes_at: float | None = None
    # When the position was last reported (monotonic seconds).
    reported_at: float = 0.0
    # Pause in seconds before the daemon is asked what is wrong, while the consumer stands still.
    pause: float = FIRST_CHECK_SECONDS
    # Last reported: note, epoch that the current one is a part of, counts, and whether files are being learned.
    last_report: tuple[str, tuple[int, int] | None, LoaderCounts, bool] = ("", None, NO_COUNTS, False)
    # What the loader has delivered, and how long that took.
    counts: LoaderCounts = NO_COUNTS
    # Whether the user was told what is understood of the loader, or what is not.
    is_line_printed: bool = False
    # The learned files of the samples.
    learned: LearnedFiles = field(init=False)
    # Whether only opened files tell which files the samples are.
    is_learning: bool = field(init=False)
    # Number of samples: more than in `opening` where the dataset and its sampler have no `__len__`.
    _length: int = field(init=False)
    # The search for a rule that gives the files of all samples.
    inference: RuleInference | None = None
    # Whether the daemon has to forget the files, which were wrong.
    has_wrong_files: bool = False
    _rule: FileRule | None = None  # source of `shares`
    _comparison: FileComparison = field(default_factory=FileComparison)
    # How often listed or learned files were wrong.
    _mistakes: int = 0
    # What the training process reports as unknown.
    _unknown: UnknownProperty | None = None
    _unexplained: UnexplainedFiles = field(default_factory=UnexplainedFiles)
    # A file that the loader opened: its mount, and its inode number.
    _opened_file: tuple[MountPoint, int] | None = None
    # Number of learned samples when `shares` was made of them.
    _samples_in_shares: int = 0
    _first_epoch: int | None = None

    def set_files(self, files: Sequence[str]) -> None:
        """Set the file of each sample. Raises OSError."""
        absolute = [path if path.startswith("/") else os.path.join(self.opening.cwd, path) for path in files]
        self._set_shares(find_shares(absolute, MountResolver(), max(self._length, len(files))))

    def __post_init__(self) -> None:
        self._length = self.opening.length
        self.is_learning = self.opening.learn
        self.learned = LearnedFiles(self._length if self.opening.learn else 0)

    @property
    def wanted_samples(self) -> WantedSamples:
        """The samples whose opened files should be reported."""
        if self._has_unknown_files:
            return WantedSamples.UNKNOWN
        return WantedSamples.SOME if self.opening.compare and not self._is_given_up else WantedSamples.NONE

    @property
    def _has_unknown_files(self) -> bool:
        """Whether the files of some samples are unknown."""
        return self.is_learning and self._rule is None and not self.learned.is_full

    @property
    def _is_given_up(self) -> bool:
        return self._mistakes >= MAX_MISTAKES

    def set_columns(self, columns: Sequence[DatasetColumn]) -> None:
        """Set the columns of the dataset, from which to infer the samples' files."""
        if self.is_learning and self._rule is None:
            self.inference = RuleInference(columns, self._length)

    def record_opened(self, observed: OpenedFiles, resolver: MountResolver) -> None:
        """Record the files that were opened for some samples."""
        if not self.is_learning or self._rule is None:
            self._compare_files(observed, resolver)
        if not self.is_learning:
            return
        if self.inference is not None:
            self.inference.add_opened(observed)
        self._unexplained.add_opened(observed.samples, observed.paths)
        if self._opened_file is None and observed.paths:
            self._opened_file = find_file(observed.paths[0], resolver)
        each, remainder = divmod(len(observed.paths), max(1, len(observed.samples)))
        if observed.is_in_order and each and not remainder:
            # Files can be matched with the samples of a batch only where all have equally many.
            for number, sample in enumerate(observed.samples):
                paths = dict.fromkeys(observed.paths[number * each : (number + 1) * each])
                self.learned.learn_sample(sample, list(paths), resolver)

    def _compare_files(self, observed: OpenedFiles, resolver: MountResolver) -> None:
        if not self.opening.compare or not self.shares or self.has_wrong_files:
            return
        files = [file for path in observed.paths if (file := find_file(path, resolver)) is not None]
        self._comparison.compare_opened(observed, [inode for _, inode in files], self.shares)
        if self._comparison.is_wrong:
            self.has_wrong_files = True
            self.is_learning = True
            self._mistakes += 1
            self._comparison = FileComparison()
            self.learned = LearnedFiles(0 if self._is_given_up else self._length)

    def apply_rule(self, resolver: MountResolver) -> None:
        """Make shares of the inferred rule, or have them forgotten where the rule was retracted."""
        if self.inference is None:
            return
        while (rule := self.inference.rule) is not self._rule:
            self._rule = rule
            if rule is None:
                self.has_wrong_files = bool(self.shares)
                break
            files = rule.paths_of_all(self.inference.columns, self._length)
            try:
                found = find_shares(files, resolver, self._length)
            except OSError:
                found = []  # a directory that the user may not read
            # A rule is wrong where its files do not exist.
            if sum(len(share.entries) for share in found) < (1 - MAX_WRONG_PART) * sum(map(len, files)):
                self.inference.reject_rule()
            else:
                self._set_shares(found)
        if self.inference.has_failed:
            self.inference = None

    @property
    def has_new_rule(self) -> bool:
        """Whether a rule was found or retracted since the last `apply_rule`."""
        return self.has_wrong_files or (self.inference is not None and self.inference.rule is not self._rule)

    def drop_files(self) -> None:
        """Drop the files, which the daemon has forgotten."""
        self.shares, self.published, self.has_wrong_files, self._samples_in_shares = [], False, False, 0
        self.reported_orders.clear()

    def reopen(self) -> None:
        """Continue with a new loader of the same samples, and keep what was learned."""
        self.closes_at = None
        self.orders.clear()
        self.reported_orders.clear()
        self._first_epoch = self.epoch = -1

    @property
    def has_begun(self) -> bool:
        """Whether the consumer is in an epoch. A loader that was made anew is in none until it names its epoch."""
        return self.epoch >= 0

    def use_learned_files(self) -> bool:
        """Make shares of the learned files, once all are known or an epoch has passed. Return whether there are any."""
        if not self.is_learning or self._rule is not None:
            return False
        known = self.learned.count
        epoch_gone_by = self._first_epoch is not None and self.epoch > self._first_epoch
        worth_it = self.learned.is_full or (epoch_gone_by and known > 1.05 * self._samples_in_shares)
        if not worth_it or known <= self._samples_in_shares:
            return False
        self._set_shares(self.learned.make_shares())
        self._samples_in_shares = known
        return True

    # --- what is not understood -----------------------------------------------------------------------------------

    def set_unknown(self, unknown: str, opened: str = "") -> None:
        """Set what the training process does not understand of the consumer; "" where it understands all. opened: a
        file that the consumer reads, where the training process itself tells the user. Raises ValueError."""
        self.is_line_printed = self.is_line_printed or bool(opened)
        self._unknown = UnknownProperty(unknown) if unknown else None
        if opened and self._opened_file is None:
            self._opened_file = find_file(opened, MountResolver())

    @property
    def note(self) -> str:
        """The user's line on what is not understood; "" where all is, or no read from a mount is known."""
        unknown = (self._unexplained.unknown if self._has_no_files else None) or self._unknown
        if unknown is None or (self._has_no_files and self._opened_file is None):
            return ""
        return unknown_text(unknown, self.opening.dataset, self.opening.sampler, self.opening.place)

    @property
    def loader(self) -> str:
        """The name of the consumer's loader; "" where it has no loader of torch."""
        return loader_name(self.opening.dataset, self.opening.place) if self.opening.dataset else ""

    @property
    def known_line(self) -> str:
        """The user's line on what is understood; "" while that is unknown, or where `note` tells it."""
        if not self.loader or self.note or self._has_no_files:
            return ""
        order = self.orders.get(self.epoch) if self.opening.shards else None
        if order is not None:
            return shards_text(self.loader, len(order), max(1, self.counts.epochs))
        if not self._has_whole_epoch:
            return ""
        if self.is_learning and self._rule is None:
            return learned_text(self.loader, max(2, self.counts.epochs))
        tally = self.counts
        return known_text(self.loader, tally.epoch_length, tally.epochs, by_rule=self._rule is not None)

    @property
    def last_line(self) -> str:
        """The line for the end of the consumer: `note` or `known_line`, or that a loader was not understood in time."""
        return (
            self.note or self.known_line or (unsettled_text(self.loader) if self.loader and self.counts.samples else "")
        )

    @property
    def _has_whole_epoch(self) -> bool:
        """Whether the order of the whole current epoch is published, not parts of it as they are drawn."""
        order, length = self.orders.get(self.epoch), self.counts.epoch_length
        _, begins = self.parts.get(self.epoch, (-1, 0))
        if self.spec is not None:
            return length > 0
        # The rest of a resumed epoch is published at once. The last one of several parts reaches the end, too.
        return order is not None and 0 < length <= begins + len(order) and 2 * len(order) > length

    @property
    def _has_no_files(self) -> bool:
        return not any(len(share.entries) for share in self.shares)

    @property
    def was_learned(self) -> bool:
        """Whether only opened files tell which files the samples are."""
        return self.is_learning and self._rule is None

    @property
    def is_shown_learning(self) -> bool:
        """Whether the daemon knows the consumer, but its files are still being learned."""
        return self.is_learning and self._has_no_files and not self._is_given_up

    def add_empty_share(self) -> None:
        """Let the daemon know a consumer that reads unknown files from a mount, by a share without files."""
        if not self.shares and self._opened_file is not None and (self.note or self.is_learning):
            mount, inode = self._opened_file
            self.shares = [empty_share(mount, inode)]

    @property
    def has_order(self) -> bool:
        return self.spec is not None or bool(self.orders)

    def set_order(self, epoch: int, order: OrderArray, part: tuple[int, int] | None = None) -> None:
        """Set an epoch's order. Raises ConfigError where too many orders are published ahead. part: see `parts`."""
        others = sum(known.nbytes for number, known in self.orders.items() if number != epoch)
        if others and others + order.nbytes > MAX_ORDER_BYTES:
            raise ConfigError(
                f"the order of epoch {epoch} of consumer {self.opening.name} is not kept, as those of other epochs have"
                f" {others >> 20} MiB; publish each epoch as it begins"
            )
        self._begin_first_epoch(epoch)
        if self.spec is not None:
            # The daemon has to forget the spec, which is no longer right.
            self.spec = None
            self.published = False
        self.orders[epoch] = order
        if self.opening.learn and len(order) and self._length <= (last := int(order.max())) < MAX_SAMPLES:
            self._set_length(last + 1)
        if part is not None:
            self.parts[epoch] = part
        self.reported_orders = {(share, known) for share, known in self.reported_orders if known != epoch}

    def _set_length(self, length: int) -> None:
        """Set a larger number of samples than was known. The files of the new samples are still to be learned."""
        self._length = length
        if not self._is_given_up:
            self.learned.set_length(length)
        if self.inference is not None:
            self.inference.set_length(length)
            self._rule = None  # `apply_rule` makes its shares anew

    def set_spec(self, spec: SamplerSpec, epoch: int) -> None:
        self._begin_first_epoch(epoch)
        self.spec = spec
        self.orders.clear()
        self.parts.clear()
        self.reported_orders.clear()

    def _begin_first_epoch(self, epoch: int) -> None:
        if self._first_epoch is None:
            self._first_epoch = self.epoch = epoch

    def set_position(self, epoch: int, position: int) -> bool:
        """Set the consumer's position. Return whether it has changed."""
        if (epoch, position) == (self.epoch, self.position):
            return False
        self.epoch, self.position = epoch, position
        for of_epochs in (self.orders, self.parts):
            for old in [known for known in of_epochs if known < epoch]:
                del of_epochs[old]
        return True

    def order_of_epoch(self, epoch: int) -> OrderArray | None:
        """Return the samples of *epoch* in order; None if unknown. Raises ConfigError for an invalid spec."""
        if epoch not in self.orders and self.spec is not None and epoch < self.spec.epochs:
            self.orders[epoch] = epoch_order(self.spec, epoch)
        return self.orders.get(epoch)

    def spec_for(self, share: FileShare) -> SamplerSpec | None:
        """Return the spec for the orders of *share*; None where its files are not the samples one by one."""
        return self.spec if share.is_one_to_one else None

    def unreported_epochs(self, number: int) -> list[int]:
        """Return the epochs whose order of share *number* the daemon needs now, and does not know."""
        if self.spec_for(self.shares[number]) is not None or self._has_no_files:
            return []
        known = {self.epoch, self.epoch + 1} if self.spec is not None else set(self.orders)
        return sorted(epoch for epoch in known if epoch >= self.epoch and (number, epoch) not in self.reported_orders)

    def position_in(self, share: FileShare) -> int:
        """Return how many files of *share* belong to the samples delivered in this epoch. Raises ConfigError."""
        if share.is_one_to_one:
            return self.position
        order = self.order_of_epoch(self.epoch)
        return 0 if order is None else share.file_position(order, self.position)

    def part_in(self, share: FileShare) -> tuple[int, int]:
        """Return the epoch of the job that the current epoch is a part of, and about how many files of *share* come
        before it there; (-1, 0) where it is no part."""
        epoch, begins = self.parts.get(self.epoch, (-1, 0))
        return epoch, begins if share.is_one_to_one else begins * len(share.samples) // max(1, share.length)

    def _set_shares(self, found: Sequence[FileShare]) -> None:
        if self.opening.indexer:
            found = [dataclasses.replace(share, of_records=True) for share in found]
        # The largest share is published under the consumer's own name.
        self.shares = sorted(found, key=lambda share: -len(share.entries))
        self.published = False
        self.reported_orders.clear()


def decode_order(bulk: bytes) -> OrderArray:
    """Return the order in a message: sample numbers, shape (n,), uint32."""
    return numpy.frombuffer(bulk, dtype="<u4")


def decode_part(message: dict[str, Any]) -> tuple[int, int] | None:
    """Return the epoch of the job that an order in a message is a part of, and how many of its samples come before."""
    part = message.get("part")
    return None if part is None else (int(part[0]), int(part[1]))


def decode_spec(fields: dict[str, Any]) -> SamplerSpec:
    """Return the spec in a message. Raises msgspec.ValidationError, ConfigError."""
    spec = msgspec.convert(fields, SamplerSpec)
    spec.check()
    return spec
