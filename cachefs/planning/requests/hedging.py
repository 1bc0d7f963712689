"""Whether a request that is late is sent a second time (hedged): the first good answer counts.

Jeffrey Dean and Luiz André Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013. A second request helps
where a few requests are slow. Where many are, the server or this machine is slow, and more requests make that worse.
"""

from typing import Final

# Second requests that may be saved up. More at once would be a burst.
_SAVED: Final = 8.0
# Of the requests under way, the part that may be late.
_FEW: Final = 0.25


class HedgeBudget:
    """Second requests, as a share of all requests."""

    def __init__(self, share: float) -> None:
        """share: of the requests that were sent; 0: there is never a second one."""
        self._share = share
        self._saved = 0.0

    def sent(self) -> None:
        """A first request was sent."""
        if self._saved < _SAVED:
            self._saved += self._share

    def take(self) -> bool:
        """Whether a second request may be sent; if so, it is counted."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


def only_few(late: int, under_way: int) -> bool:
    """Are so few of the requests under way late that the server is not slow as a whole?"""
    return late <= max(1.0, _FEW * under_way)
