"""How many of a consumer's reads show: the kernel's page cache serves the others, and nobody sees them."""

from typing import Final

# How far ahead reads may be beyond what the loader's workers and the number of reads explain.
SLACK: Final = 4
# At least this share of the reads that are done is taken to show.
LOWEST_DENSITY: Final = 0.05
# With each report, all that was seen before counts only this much of what it counted.
FADING: Final = 0.9
# Reads from which the density starts.
_FIRST: Final = 32


class Visibility:
    """The visibility of one consumer's reads."""

    def __init__(self) -> None:
        # Reads that lie ahead of the consumer, per read among them that will show: pages of the others were pushed.
        self.hidden = 1.0
        self._density = 1.0  # reads that showed of late, per read that was done
        self._seen = self._gained = float(_FIRST)  # the two numbers of which this is the quotient

    @property
    def step(self) -> float:
        """How far behind a read that shows the one that showed before it may be, in reads of different blocks."""
        return max(SLACK + 2 / self._density, SLACK * self.hidden)

    def on_reads(self, count: int) -> None:
        """So many reads have shown."""
        self._seen = FADING * self._seen + count
        self._gained = FADING * self._gained

    def on_gain(self, gained: int) -> None:
        """These reads have brought the consumer so much further."""
        self._gained += max(0, gained)
        self._density = min(1.0, max(LOWEST_DENSITY, self._seen / max(1.0, self._gained)))

    def restart(self, density: float) -> None:
        """Nothing counts but that *density*, in reads that show per read that is done, was seen."""
        self._density = density
        self._seen, self._gained = _FIRST * density, float(_FIRST)
