"""Watches one loader: publishes its epochs, and its position.

An epoch is published when it begins, where its order follows from what can be read, or lies ready in the sampler's
iterator. The rest is published as it is drawn, in parts, since a loader with workers draws batches ahead. The daemon
handles each part as an epoch of its own, and knows which epoch of the job it is a part of.
"""

import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy

from cachefs.hooks import opened_files
from cachefs.hooks.mounted import find_listed_files, has_mount_path
from cachefs.hooks.order.foresee import SampleOrder, SamplerOrder, array_in, numbers_in
from cachefs.hooks.order.library_iterators import SamplerRepeats, count_skipped, read_iterator
from cachefs.hooks.order.prediction import OrderPrediction
from cachefs.hooks.order.remaining import UnreadableItems
from cachefs.publishing import clock
from cachefs.publishing.channel import own_channel
from cachefs.publishing.diagnostics import UnknownProperty
from cachefs.publishing.files.listed import DatasetListing, join_texts, read_listing
from cachefs.publishing.job_objects import attributes_of, length_of
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import Stopwatch
from cachefs.publishing.publication import Publication, close_after

# Number of epochs published from a spec: a job does not say how many it will run.
EPOCHS_AHEAD: Final = 1000
# Maximum length of a column's name in characters.
MAX_COLUMN_NAME: Final = 100
# Number of batches after which an order counts as unknown. The search covers the first sixteen of an epoch, and the
# previous epoch.
BATCHES_BEFORE_UNKNOWN: Final = 32
# Minimum seconds between two parts of an epoch: each costs the daemon about 1 ms.
PART_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class _PublishedPart:
    """A published part of an epoch, or the whole epoch."""

    # Number of the part, which is an epoch for the daemon.
    number: int
    # Range of its samples in the epoch.
    start: int
    end: float
    # The samples, where they are guessed.
    predicted: SampleOrder | None = None
    # Number of samples that the sampler's iterator had given when the epoch began.
    epoch_start: int = 0


class LoaderWatch:
    """Watches one loader, from its first epoch to its end.

    A loader that is not known to read from a mount costs nothing, and publishes nothing, until a file under a mount is
    opened for one of its samples. It is known from the start where its dataset, or an argument of the program, names a
    directory of a mount.
    """

    def __init__(
        self,
        loader: Any,
        sampler: SamplerOrder,
        opening: dict[str, Any],
        files: Sequence[str] | None,
        dataset_listing: DatasetListing,
    ) -> None:
        """opening: of the publication; files: of the samples, None to learn them; dataset_listing: the dataset's
        listing."""
        self.number = opened_files.new_loader_number()  # of the loader in this process
        self.stopwatch = Stopwatch()
        self._open_mark = opened_files.open_mark_path(self.number, os.getpid())
        self._sampler = sampler
        self._opening = opening
        self._publication: Publication | None = None
        settings = attributes_of(loader)
        # Batches that are drawn before they are read.
        self._batches_ahead = max(1, (settings.get("num_workers") or 0) * (settings.get("prefetch_factor") or 0))
        # Samples of the dataset; None while unknown. `_largest` is one more than the largest number drawn until then.
        self._length = len(files) if files is not None else length_of(settings.get("dataset"))
        self._largest = 0
        self._is_reading_mount = files is not None or has_mount_path(dataset_listing)
        # The state of the epoch:
        self._part_number = -1  # of its latest part
        self._spec: dict[str, Any] | None = None  # as last published
        self._is_following_spec = True  # whether all epochs since the publication were those of a spec
        self._parts: deque[_PublishedPart] = deque()  # published parts that are not delivered
        self._expected: SampleOrder | None = None  # samples of the epoch, until they are compared with the first batch
        self._expected_next: list[SampleOrder] = []  # expected orders of the next epochs
        # Whether guesses are published: the last one was right, or only the sampler draws from its generator.
        self._has_reliable_orders = sampler.has_own_generator
        self._epochs_begun = 0  # epochs
        self._repeats = SamplerRepeats()
        self._epoch_start = 0  # samples that the sampler's iterator had given when the epoch began
        self._skipped = 0  # samples of the epoch before the point where it was resumed here
        self._drawn = 0  # samples
        # Whether the rest of the sampler's list may be read. One failure in an epoch is enough.
        self._can_read_remaining = True
        # Number of drawn samples at which the list is read further, of which only the beginning was read.
        self._read_further_at = inf
        self._unpublished: list[int] | None = []  # samples drawn and not published; None where they are no numbers
        self._prediction = OrderPrediction(sampler.samplers)
        # While it is unknown whether the first epoch is read from a mount: the samples that the sampler will give, and
        # those that it has given first.
        # give, and those that it has given first.
        self._foreseen: list[SampleOrder] | None = None
        self._first_batch: list[int] | None = None
        # Successive batches without a known continuation, except those at the beginning of an epoch that are drawn
        # ahead anyway: a short epoch has no others.
        self._batches_without_order = 0
        self._published_note = ""  # what was reported as not understood
        self._last_part_at = 0.0  # when the latest part was published (monotonic seconds)
        weakref.finalize(self, opened_files.record_end, self.number, self._open_mark, os.getpid())
        if files is not None:
            self._publish_files(files)
        elif self._is_reading_mount and self._length is not None:
            self._publish_without_files(self._length, dataset_listing)

    @property
    def epoch_length(self) -> int:
        """The number of samples in the epoch that begins: from its order, else that of the last epoch, else the rank's
        part of the dataset; 0 where unknown."""
        if self._expected is not None:
            return self._skipped + len(self._expected)
        if self._foreseen:
            return len(self._foreseen[0])
        return self.stopwatch.last_length or self._sampler.length or self._length or 0

    def publish_counts(self) -> None:
        """Publish the stopwatch's counts."""
        if self._publication is not None:
            if not self.stopwatch.counts.epoch_length and self._opening.get("world_size", 1) == 1:
                self.stopwatch.assume_length(self._length or 0)
            self._publication.publish_counts(self.stopwatch.counts)

    def begin_epoch(self, iterator: Any, dataset: Any) -> None:
        """Begin an epoch, before the first call of the sampler's *iterator*. dataset: of torch's iterator."""
        self._epochs_begun += 1
        self._skipped = count_skipped(iterator)
        self._can_read_remaining, self._read_further_at = True, inf
        self._drawn, self._unpublished, self._expected = self._skipped, [], None
        self._parts.clear()
        self._prediction.begin_epoch()
        self._repeats, self._epoch_start = SamplerRepeats(), 0
        if self._publication is None:
            self._foreseen = self._foresee_orders(iterator) if self._epochs_begun == 1 else None
            self._first_batch = None
            self._length = self._length or self._largest or None
            return
        is_of_spec = self._publish_spec()
        found = None if is_of_spec else self._foresee_orders(iterator)
        if found is not None:
            self._publish_expected(found[0], found[1:])
        if is_of_spec or found is not None:
            self._batches_without_order = 0

    def _foresee_orders(self, iterator: Any) -> list[SampleOrder] | None:
        """Return the rest of the epoch that begins, and the orders of those after it, as far as they are known."""
        foreseen = self._sampler.foresee_orders() if not self._skipped else None
        if foreseen is not None:
            return foreseen
        remaining = self._remaining_samples(iterator)
        return [remaining] if remaining is not None and len(remaining) else None

    def _remaining_samples(self, iterator: Any) -> SampleOrder | None:
        """Return the remaining samples that the sampler's *iterator* holds, or the beginning of them."""
        if not self._can_read_remaining:
            return None
        try:
            remaining = read_iterator(iterator)
        except UnreadableItems:
            self._can_read_remaining = False
            return None
        if remaining is None:
            self._read_further_at = inf
            return None
        self._read_further_at = inf if remaining.is_complete else self._drawn + len(remaining.samples) // 2
        return remaining.samples

    def _publish_spec(self) -> bool:
        """Publish the epoch that begins as one of a spec, if it is one, and return whether it is."""
        if self._publication is None:
            return False
        spec = self._sampler.sampler_spec() if self._is_following_spec else None
        if spec is not None and self._sampler.epoch != self._part_number:
            number = self._sampler.epoch
            if self._spec != spec:
                self._publication.sampler({**spec, "epochs": number + EPOCHS_AHEAD}, number)
            self._spec, self._part_number = spec, number
            self._parts.append(_PublishedPart(number, 0, float("inf")))
            self.record_delivered(0)
            return True
        # A DistributedSampler comes here where the script does not set its epoch, so that it repeats itself.
        self._spec, self._is_following_spec = None, False
        return False

    def record_draw(self, index: Any, iterator: Any, delivered: int, dataset: Any) -> None:
        """Record that *index*, a sample number or a batch of them, was drawn from *iterator*; *delivered* samples of
        the epoch are with the job. dataset: the one that torch's iterator reads from."""
        begun = self._drawn
        self._drawn += count_samples(index)
        if self._repeats.has_begun_pass(iterator):
            self._begin_pass(begun)
        if self._publication is None:
            is_first, self._first_batch = self._first_batch is None, self._first_batch or numbers_in(index) or []
            if self._length is None:
                self._find_length(index, iterator if is_first else None, dataset)
            if self._length is not None:
                self._start_publishing(iterator, dataset)
            return
        if self._expected is not None:
            self._check_expected(self._expected, index)
        if self._drawn >= self._read_further_at:
            self._publish_further(iterator)
        if self._unpublished is None or (self._drawn <= self._published_end and not self._prediction.is_predicting):
            return
        numbers = numbers_in(index)
        if numbers is None or len(numbers) != self._drawn - begun:
            self._unpublished = None
            self._publish_note(UnknownProperty.NUMBERS)
            return
        if not self._prediction.check_drawn(numbers):
            self._replace_prediction(begun, numbers)
        self._unpublished += numbers[max(0, int(min(self._published_end, self._drawn)) - begun) :]
        if self._unpublished:
            self._publish_drawn(self._unpublished, iterator, delivered)
        more = self._prediction.extend_published()
        if more is not None:
            self._publish_part(more, predicted=True)

    def _publish_further(self, iterator: Any) -> None:
        """Publish more of the list whose beginning is published, after half of that was drawn."""
        remaining = self._remaining_samples(iterator)
        known = int(self._published_end) - self._drawn
        if remaining is not None and 0 <= known < len(remaining) and not self._unpublished:
            self._publish_part(remaining[known:])

    def _begin_pass(self, begun: int) -> None:
        """Begin another epoch of the job within the sampler's iterator, which had given *begun* samples before."""
        self._epochs_begun += 1
        self._epoch_start = begun
        if not self._prediction.is_predicting:
            self._prediction.begin_epoch()

    @property
    def _published_end(self) -> float:
        """The number of samples of the epoch that are published, or came before it was resumed."""
        return self._parts[-1].end if self._parts else self._skipped

    def record_delivered(self, delivered: int, *, at_end: bool = False) -> None:
        """Record that *delivered* samples of the epoch were delivered. at_end: the sampler has no more."""
        if self._publication is None:
            return
        delivered += self._skipped
        while len(self._parts) > 1 and delivered >= self._parts[0].end:
            self._parts.popleft()
        if at_end and self._batches_without_order == 0 and self._unpublished is not None:
            self._publish_note("")
        if self._parts:
            part = self._parts[0]
            self._publication.progress(part.number, int(min(max(0, delivered - part.start), part.end - part.start)))
        if at_end and self._unpublished:
            self._publish_part(self._unpublished)

    # --- publishing
    # -----------------------------------------------------------------------------------------------------

    def _publish_expected(self, current: SampleOrder, following: list[SampleOrder]) -> None:
        """Publish the orders of the epoch that begins, and of those after it."""
        guesses, self._expected_next = self._expected_next, following
        was_right = bool(guesses) and numpy.array_equal(guesses[0], current)
        published = guesses if self._has_reliable_orders else []  # the published orders of these epochs
        if guesses:
            self._has_reliable_orders = was_right
        self._part_number += 1
        self._parts.append(_PublishedPart(self._part_number, self._skipped, self._skipped + len(current)))
        self._expected = current
        orders = [current, *following]
        # Where the last guesses were wrong, new ones are published only in place of them.
        for ahead, samples in enumerate(orders if self._has_reliable_orders else orders[: max(1, len(published))]):
            if ahead >= len(published) or not numpy.array_equal(published[ahead], samples):
                before = 0 if ahead else self._skipped
                self._publish_order(self._part_number + ahead, samples, (self._epochs_begun - 1 + ahead, before))
        self.record_delivered(0)

    def _check_expected(self, expected: SampleOrder, index: Any) -> None:
        """Compare the first batch with the expected samples."""
        self._expected = None
        numbers = numbers_in(index)
        if numbers is None or not numpy.array_equal(expected[: len(numbers)], numbers):
            self._part_number -= 1  # what was published as this epoch is replaced
            self._parts.clear()

    def _publish_drawn(self, fresh: list[int], iterator: Any, delivered: int) -> None:
        remaining = self._remaining_samples(iterator)
        guessed = self._prediction.predict_order(iterator, self._length or 0) if remaining is None else None
        if remaining is not None or self._prediction.is_predicting:
            self._batches_without_order = 0
        elif self._drawn - self._epoch_start > self._batches_ahead * self._sampler.batch_size:
            self._batches_without_order += 1
        if self._batches_without_order >= BATCHES_BEFORE_UNKNOWN:
            self._publish_note(UnknownProperty.ORDER)
        if remaining is not None and len(remaining):
            self._publish_part(_concatenate(fresh, remaining))
        elif guessed is not None:
            self._publish_part(_concatenate(fresh, guessed), predicted=True)
        elif self._is_worth_a_part(len(fresh), delivered + self._skipped):
            self._publish_part(fresh)
        self.record_delivered(delivered)

    def _is_worth_a_part(self, fresh: int, delivered: int) -> bool:
        """Return whether to publish the drawn samples. The daemon plans the current part and the next one, so nothing
        is published while another part is not begun."""
        if self._parts and self._parts[-1].start > delivered:
            return False
        if fresh < self._batches_ahead * self._sampler.batch_size // 2:
            return False
        return len(self._parts) == 1 or clock.monotonic() >= self._last_part_at + PART_SECONDS

    def _replace_prediction(self, begun: int, numbers: list[int]) -> None:
        """Replace the samples guessed from *begun* on by the drawn *numbers*."""
        while self._parts and self._parts[-1].predicted is not None and self._parts[-1].end > begun:
            part = self._parts.pop()
            if part.start <= begun:
                samples = _concatenate(part.predicted[: begun - part.start], numbers)  # type: ignore[index]
                self._parts.append(_PublishedPart(part.number, part.start, self._drawn, None, part.epoch_start))
                self._part_number = part.number
                self._publish_order(part.number, samples, (self._epochs_begun - 1, part.start - part.epoch_start))

    def _publish_part(self, samples: Any, *, predicted: bool = False) -> None:
        """Publish *samples*, which begin with the fresh ones, as a part."""
        start = int(max(self._published_end, self._drawn - len(self._unpublished or ())))
        self._part_number += 1
        self._expected_next = []
        known = samples if predicted else None
        self._parts.append(_PublishedPart(self._part_number, start, start + len(samples), known, self._epoch_start))
        self._publish_order(self._part_number, samples, (self._epochs_begun - 1, max(0, start - self._epoch_start)))
        self._unpublished = []
        self._last_part_at = clock.monotonic()

    def _publish_note(self, unknown: str) -> None:
        """Publish what is not understood of this loader; "" where it is understood now."""
        if self._publication is not None and unknown != self._published_note:
            self._published_note = unknown
            self._publication.publish_note(unknown)

    def _publish_order(self, number: int, samples: Any, part: tuple[int, int]) -> None:
        """Publish *samples* as epoch *number*. part: the job's own epoch with these samples, and their offset in it."""
        if self._publication is not None:
            self._publication.order(number, samples, part)

    # --- loaders with unknown files
    # -------------------------------------------------------------------------------------

    def _find_length(self, index: Any, iterator: Any, dataset: Any) -> None:
        """Find the number of samples from the sampler's numbers: from all of an epoch, where they lie ready in
        *iterator*, which is None where it was examined already."""
        self._largest = max(self._largest, 1 + max(numbers_in(index) or [-1]))
        if iterator is None or dataset is None:
            return
        known = self._foreseen[0] if self._foreseen else self._remaining_samples(iterator)
        is_complete = self._read_further_at == inf
        if known is None or not len(known) or not is_complete:
            return
        self._length = max(self._largest, 1 + int(known.max()))
        listed = find_listed_files(dataset, read_listing(dataset), self._length, MountResolver())
        if listed.files is not None:
            self._is_reading_mount = True
            self._publish_files(listed.files)

    def _start_publishing(self, iterator: Any, dataset: Any) -> None:
        """Begin to publish, if a file under a mount was opened for a sample. The rest of this epoch is published where
        it lies ready in the sampler's iterator."""
        if self._publication is None:
            if dataset is None or not (
                self._is_reading_mount or opened_files.has_opened_file(self.number, self._open_mark)
            ):
                return
            self._publish_without_files(self._length or 0, read_listing(dataset))
        if self._publication is None:
            return
        if self._epochs_begun == 1 and self._publish_spec():
            return
        self._part_number = self._epochs_begun - 1  # of this epoch, and of the part before the next one
        first, foreseen = self._first_batch, self._foreseen
        self._first_batch = self._foreseen = None
        if foreseen and first and numpy.array_equal(foreseen[0][: len(first)], first):
            self._part_number -= 1
            self._publish_expected(foreseen[0], foreseen[1:])
            self._expected = None
            return
        remaining = self._remaining_samples(iterator)
        if remaining is not None and len(remaining):
            self._part_number -= 1
            self._publish_part(remaining)

    def _publish_without_files(self, length: int, dataset_listing: DatasetListing) -> None:
        """Have the helper learn the samples' files. length: number of samples; dataset_listing: the dataset's
        listing."""
        if length > opened_files.MAX_SAMPLES:
            return
        opening = {**self._opening, "length": length, "learn": True}
        publication = Publication((), opening, rank=self._sampler.rank()[0])
        _send_columns(publication, dataset_listing, length)
        self._publish_as(publication, length)

    def _publish_files(self, files: Sequence[str]) -> None:
        opening = {**self._opening, "length": len(files)}
        self._publish_as(Publication(files, opening, rank=self._sampler.rank()[0]), len(files))

    def _publish_as(self, publication: Publication, length: int) -> None:
        self._publication = publication
        close_after(self, publication)
        if publication.slot >= 0:
            opened_files.register_consumer(self.number, publication.slot, length, own_channel().directory)


def _send_columns(publication: Publication, dataset_listing: DatasetListing, length: int) -> None:
    """Send the columns that the dataset lists."""
    described, parts = [], []
    for name, values in dataset_listing.take_columns(length).items():
        part = values.astype("<i8").tobytes() if isinstance(values, numpy.ndarray) else join_texts(values)
        if part is not None:
            described.append((name[:MAX_COLUMN_NAME], isinstance(values, numpy.ndarray), len(part)))
            parts.append(part)
    publication.publish_columns(length, described, b"".join(parts))


def _concatenate(samples: Any, others: Any) -> SampleOrder:
    return numpy.concatenate([numpy.asarray(one, dtype=numpy.int64) for one in (samples, others)])


def count_samples(index: Any) -> int:
    """Return how many samples a sampler's item has: one, or the length of a batch."""
    kind = type(index)
    for container in (list, tuple, range):
        if issubclass(kind, container):  # a class of the job's own may have a `__len__`, which is not run
            return container.__len__(index)
    array = array_in(index)
    return len(array) if array is not None and array.ndim else 1
