"""Decides whether a late request is sent a second time (hedged): the first good answer counts.

Jeffrey Dean and Luiz André Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013. A second request helps
where a few requests are slow. Where many are, the server or this machine is slow, and more requests make that worse.
"""

from typing import Final

# Most second requests that may be saved up. More at once would be a burst.
_MAX_SAVED: Final = 8.0
# Part of the requests under way that may be late.
_FEW_SHARE: Final = 0.25


class HedgeBudget:
    """Limits second requests to a share of all requests."""

    def __init__(self, share: float) -> None:
        """share: of the requests that were sent; 0: there is never a second one."""
        self._share = share
        self._saved = 0.0

    def note_sent(self) -> None:
        """Count a first request."""
        if self._saved < _MAX_SAVED:
            self._saved += self._share

    def take_hedge(self) -> bool:
        """Return whether a second request may be sent; if so, count it."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


def are_few_late(late: int, under_way: int) -> bool:
    """Return whether so few of the requests under way are late that the server as a whole is not slow."""
    return late <= max(1.0, _FEW_SHARE * under_way)
