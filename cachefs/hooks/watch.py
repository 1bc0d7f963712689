"""One loader that is watched: what is published of its epochs, and how far it is.

An epoch is published when it begins, where its order follows from what can be read, or lies ready in the sampler's
iterator. What remains is published as it is drawn, in parts, since a loader with workers draws batches ahead. For the
daemon every part is an epoch of its own.
"""

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy

from cachefs.hooks import opened
from cachefs.hooks.held import still_held
from cachefs.hooks.order import AnyOrder, SamplerOrder, numbers_in
from cachefs.publishing.channel import channel, warn
from cachefs.publishing.publication import Publication

# A script may make a loader anew for each epoch; so a consumer ends only so many seconds after its loader.
CLOSE_SECONDS: Final = 10.0
# Epochs that are published where they follow from a spec: a job does not say how many it will run.
EPOCHS_AHEAD: Final = 1000
# Seconds between two parts of an epoch, at least: each costs the daemon about 1 ms.
PART_SECONDS: Final = 0.05

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an epoch that was published, or all of it."""

    # Its number for the daemon, which takes it for an epoch.
    number: int
    # Its samples among those of the epoch: the first, and the one after the last.
    start: int
    end: float


class Watch:
    """One loader, from its first epoch to its end.

    A loader of which nobody knows whether it reads from a mount costs nothing, and publishes nothing, until a file
    under a mount was opened for one of its samples. It has more attributes than most classes: they are what is known of
    one loader, and of the epoch that it is in.
    """

    def __init__(
        self, loader: Any, sampler: SamplerOrder, opening: dict[str, Any], files: Sequence[str] | None
    ) -> None:
        """opening: of the publication; files: of the samples, None where they have to be learned."""
        self.number = next(_numbers)  # of the loader in this process
        self._mark = opened.mark_of(self.number, os.getpid())
        self._sampler = sampler
        self._opening = opening
        self._publication: Publication | None = None
        self._ahead = max(1, loader.num_workers * (loader.prefetch_factor or 0))  # batches, drawn before they are read
        self._dataset = weakref.ref(loader.dataset) if files is None else None
        self.is_learning = files is None
        # What is known of the epoch:
        self._number = -1  # of its latest part
        self._spec: dict[str, Any] | None = None  # as last published
        self._follows_spec = True  # have all epochs since it is published been those of a spec?
        self._parts: deque[_Part] = deque()  # those published that are not delivered
        self._expected: AnyOrder | None = None  # its samples, until it is seen whether they come so
        self._guesses: list[AnyOrder] = []  # the orders that the next epochs are expected to have
        # Are guesses published? They are where the last one was right, or nobody else draws from the generator.
        self._trusts = sampler.has_own_generator
        self._begun = 0  # epochs
        self._drawn = 0  # samples
        self._fresh: list[int] | None = []  # samples drawn and not published; None where they are no numbers
        self._cut_at = 0.0  # when the latest part was published (monotonic seconds)
        weakref.finalize(self, opened.forget, self.number, self._mark, os.getpid())
        if files is not None:
            self._publish_as(Publication(files, opening, rank=sampler.rank()[0]))

    def begin(self) -> None:
        """The sampler is about to be asked for the first time in this epoch."""
        self._begun += 1
        self._drawn, self._fresh, self._expected = 0, [], None
        self._parts.clear()
        if self._publication is None:
            return
        spec = self._sampler.spec() if self._follows_spec else None
        if spec is not None and self._sampler.epoch != self._number:
            number = self._sampler.epoch
            if self._spec != spec:
                self._publication.sampler({**spec, "epochs": number + EPOCHS_AHEAD}, number)
            self._spec, self._number = spec, number
            self._parts.append(_Part(number, 0, float("inf")))
            self.move(0)
            return
        # A DistributedSampler comes here where the script does not set its epoch, so that it repeats itself.
        self._spec, self._follows_spec = None, False
        found = self._sampler.foresee() if self._sampler.is_known else None
        if found is not None:
            self._expect(found[0], found[1:])

    def drew(self, index: Any, iterator: Any, delivered: int) -> None:
        """*index* was drawn, a sample number or a batch of them, out of *iterator*; *delivered* samples of the epoch
        are with the job."""
        begun = self._drawn
        self._drawn += size_of(index)
        if self._publication is None:
            self._wake(iterator)
            return
        if self._expected is not None:
            self._compare(self._expected, index)
        known = int(min(self._parts[-1].end, self._drawn)) if self._parts else 0
        if self._drawn > known and self._fresh is not None:
            numbers = numbers_in(index)
            if numbers is None or len(numbers) != self._drawn - begun:
                self._fresh = None
                return
            self._fresh += numbers[max(0, known - begun) :]
            self._publish_drawn(self._fresh, iterator, delivered)

    def move(self, delivered: int, *, at_end: bool = False) -> None:
        """*delivered* samples of the epoch have been delivered. at_end: the sampler has no more."""
        if self._publication is None:
            return
        while len(self._parts) > 1 and delivered >= self._parts[0].end:
            self._parts.popleft()
        if self._parts:
            part = self._parts[0]
            self._publication.progress(part.number, int(min(max(0, delivered - part.start), part.end - part.start)))
        if at_end and self._fresh:
            self._cut(self._fresh)

    # --- what is published ----------------------------------------------------------------------------------------

    def _expect(self, current: AnyOrder, following: list[AnyOrder]) -> None:
        """These are the orders of the epoch that begins, and of those after it."""
        guesses, self._guesses = self._guesses, following
        was_right = bool(guesses) and numpy.array_equal(guesses[0], current)
        said = guesses if self._trusts else []  # what is published of these epochs
        if guesses:
            self._trusts = was_right
        self._number += 1
        self._parts.append(_Part(self._number, 0, len(current)))
        self._expected = current
        orders = [current, *following]
        # Where the last guesses were wrong, no new ones are published, but in place of those.
        for ahead, samples in enumerate(orders if self._trusts else orders[: max(1, len(said))]):
            if ahead >= len(said) or not numpy.array_equal(said[ahead], samples):
                self._order(self._number + ahead, samples)
        self.move(0)

    def _compare(self, expected: AnyOrder, index: Any) -> None:
        """The first batch tells whether the samples come as they were expected."""
        self._expected = None
        numbers = numbers_in(index)
        if numbers is None or not numpy.array_equal(expected[: len(numbers)], numbers):
            self._number -= 1  # what was published as this epoch is replaced
            self._parts.clear()

    def _publish_drawn(self, fresh: list[int], iterator: Any, delivered: int) -> None:
        held = still_held(iterator, self._sampler.whole_batches)
        if held is not None and len(held):
            self._cut(numpy.concatenate([numpy.array(fresh, dtype=numpy.int64), held]))
        elif self._is_worth_a_part(len(fresh), delivered):
            self._cut(fresh)
        self.move(delivered)

    def _is_worth_a_part(self, fresh: int, delivered: int) -> bool:
        """The daemon has the part that is read and the next one in its plan: so nothing is published while another part
        waits to be begun."""
        if self.is_learning and self._begun == 1:
            return False  # which files these samples are is learned only now
        if self._parts and self._parts[-1].start > delivered:
            return False
        if fresh < self._ahead * self._sampler.batch_size // 2:
            return False
        return len(self._parts) == 1 or time.monotonic() >= self._cut_at + PART_SECONDS

    def _cut(self, samples: Any) -> None:
        """Publish *samples*, which begin with those that are fresh, as a part."""
        start = self._drawn - len(self._fresh or ())
        self._number += 1
        self._guesses = []
        self._parts.append(_Part(self._number, start, start + len(samples)))
        self._order(self._number, samples)
        self._fresh = []
        self._cut_at = time.monotonic()

    def _order(self, number: int, samples: Any) -> None:
        if self._publication is not None:
            self._publication.order(number, samples)

    # --- loaders of which the files are not known -----------------------------------------------------------------

    def _wake(self, iterator: Any) -> None:
        """Begin to publish, if a file under a mount was opened for a sample. What is left of this epoch is published
        where it lies ready in the sampler's iterator."""
        dataset = self._dataset() if self._dataset is not None else None
        if dataset is None or not opened.was_opened(self.number, self._mark):
            return
        length = len(dataset)
        if length > opened.MAX_SAMPLES:
            self._dataset = None
            return
        opening = {**self._opening, "length": length, "learn": True}
        publication = Publication((), opening, rank=self._sampler.rank()[0])
        self._publish_as(publication)
        opened.found(self.number, publication.slot, length, channel().directory)
        self._number = self._begun - 1  # of this epoch, and of the part before the next one
        held = still_held(iterator, self._sampler.whole_batches)
        if held is not None and len(held):
            self._number -= 1
            self._cut(held)

    def _publish_as(self, publication: Publication) -> None:
        self._publication = publication
        weakref.finalize(self, _close, publication, os.getpid()).atexit = False


class Stream:
    """A loader of an IterableDataset, which alone knows what it reads: that is said, once it reads from a mount."""

    is_learning = True

    def __init__(self, name: str) -> None:
        """name: of the dataset's class."""
        self.number = next(_numbers)
        self._name = name
        self._mark = opened.mark_of(self.number, os.getpid())
        weakref.finalize(self, opened.forget, self.number, self._mark, os.getpid())

    def begin(self) -> None:
        """An epoch begins."""

    def drew(self, index: Any, iterator: Any, delivered: int) -> None:
        """A batch was asked for."""
        if self._name and opened.was_opened(self.number, self._mark):
            what = f"{self._name} is an IterableDataset, which alone knows what it reads"
            warn(f"{what}; publish its shards with cachefs.publish")
            self._name = ""

    def move(self, delivered: int, *, at_end: bool = False) -> None:
        """So many samples are delivered."""


def _close(publication: Publication, process: int) -> None:
    if os.getpid() == process:
        publication.close(after=CLOSE_SECONDS)


def size_of(index: Any) -> int:
    """How many samples the loader's sampler has given at once: one, a batch, or a batch of batches."""
    if not isinstance(index, (list, tuple)):
        return 1
    if index and isinstance(index[0], (list, tuple)):
        return sum(map(size_of, index))
    return len(index)
