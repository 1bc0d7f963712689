"""Estimates the share of a consumer's reads that is observed; the page cache answers the others without a trace."""

from typing import Final

# How far ahead reads may be beyond what the loader's workers and the number of reads explain.
SLACK_READS: Final = 4
# Least share of the done reads that is assumed to be observed.
MIN_DENSITY: Final = 0.05
# Factor on the weight of all earlier reads with each report.
FADING_FACTOR: Final = 0.9
# Initial weight of the density, in reads.
_INITIAL_READS: Final = 32


class ObservedShare:
    """The observed share of one consumer's reads."""

    def __init__(self) -> None:
        # Reads ahead of the consumer per read among them that will be observed: pages of the others were pushed.
        self.hidden_ratio = 1.0
        self._density = 1.0  # recently observed reads per done read
        self._seen = self._gained = float(_INITIAL_READS)  # numerator and denominator of the density

    @property
    def max_step(self) -> float:
        """Most distance of an observed read from the one observed before it, in reads of different blocks."""
        return max(SLACK_READS + 2 / self._density, SLACK_READS * self.hidden_ratio)

    def on_reads(self, count: int) -> None:
        """Count observed reads."""
        self._seen = FADING_FACTOR * self._seen + count
        self._gained = FADING_FACTOR * self._gained

    def on_advance(self, gained: int) -> None:
        """Record by how many reads the observed reads have moved the consumer on."""
        self._gained += max(0, gained)
        self._density = min(1.0, max(MIN_DENSITY, self._seen / max(1.0, self._gained)))

    def reset(self, density: float) -> None:
        """Restart from *density*, in observed reads per done read."""
        self._density = density
        self._seen, self._gained = _INITIAL_READS * density, float(_INITIAL_READS)
