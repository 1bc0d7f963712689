"""Counts what one loader has delivered, and how long the job's loop has waited for it."""

from typing import Final, NamedTuple

# Upper bound of epochs, and of samples of one epoch.
MAX_COUNT: Final = (1 << 32) - 1


class LoaderCounts(NamedTuple):
    """Counts since the loader's first epoch. Times are nanoseconds; each is written in one word of the shared page.

    A loop waits from when it asks the loader's iterator for a batch until it gets the batch. It is busy with the loader
    from the beginning of an epoch to the latest batch of the epoch: what lies between two epochs counts for nothing.
    """

    # Epochs that have begun.
    epochs: int = 0
    # Samples of the current epoch: all of them (0 while unknown), and the delivered ones.
    epoch_length: int = 0
    epoch_samples: int = 0
    # Delivered samples of all epochs.
    samples: int = 0
    # Time busy in this epoch; in all epochs; and time waited in all epochs.
    epoch_busy: int = 0
    busy: int = 0
    waited: int = 0
    # Time busy and time waited in the first epoch alone.
    first_busy: int = 0
    first_waited: int = 0
    # Delivered batches of all epochs; and those whose length cannot be seen: they count as many samples as were asked
    # for, so `samples` may be too large.
    batches: int = 0
    unmeasured: int = 0


NO_COUNTS: Final = LoaderCounts()


class Stopwatch:
    """Measures the tally of one loader. *now* is monotonic nanoseconds."""

    def __init__(self) -> None:
        self._epochs = self._length = self._epoch_samples = self._samples = 0
        self._epoch_busy = self._busy = self._waited = self._first_busy = self._first_waited = 0
        self._batches = self._unmeasured = 0
        self.last_length = 0  # samples of the previous epoch, where all were delivered
        self._busy_since = 0  # when the epoch began, or its latest batch came
        self._requested_at = 0  # when the pending batch was asked for; 0 without one

    @property
    def counts(self) -> LoaderCounts:
        return LoaderCounts(
            self._epochs, min(self._length, MAX_COUNT), min(self._epoch_samples, MAX_COUNT), self._samples,
            self._epoch_busy, self._busy, self._waited, self._first_busy, self._first_waited, self._batches,
            self._unmeasured,
        )  # fmt: skip

    def begin_epoch(self, now: int, length: int = 0, *, is_asked: bool = False) -> None:
        """Begin an epoch of *length* samples; 0 if unknown. is_asked: the loop has asked for its first batch
        already."""
        self._epochs += 1
        self._length, self._epoch_samples, self._epoch_busy = length, 0, 0
        if not is_asked:
            self._requested_at = 0  # the last request was answered by the end of the epoch before
        self._busy_since = self._requested_at or now

    def set_length(self, length: int) -> None:
        """Set the number of samples of the epoch, now that it is known."""
        self._length = self.last_length = length

    def assume_length(self, length: int) -> None:
        """Set the number of samples of the epoch for the time being."""
        self._length = length

    def record_request(self, now: int) -> None:
        """Record that the loop asks for a batch."""
        self._requested_at = now

    def record_batch(self, now: int, samples: int, *, is_measured: bool = True) -> None:
        """Count the batch that has come after `record_request`. is_measured: whether *samples* was measured."""
        if not self._requested_at or not self._epochs:
            return
        waited, busy = max(0, now - self._requested_at), max(0, now - self._busy_since)
        self._requested_at, self._busy_since = 0, now
        self._epoch_samples += samples
        self._samples += samples
        self._batches += 1
        self._unmeasured += not is_measured
        self._epoch_busy += busy
        self._busy += busy
        self._waited += min(waited, busy)
        if self._epochs == 1:
            self._first_busy, self._first_waited = self._busy, self._waited
        if self._length:
            self._length = max(self._length, self._epoch_samples)
