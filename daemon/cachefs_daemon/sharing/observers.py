"""Who may look at this node, and who may give it orders."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observers:
    """Names as certificates or, without TLS, headers have them; in small letters."""

    may_look: frozenset[str] = frozenset()
    # These may look too.
    may_order: frozenset[str] = frozenset()

    @classmethod
    def of(cls, observers: Sequence[str], schedulers: Sequence[str]) -> "Observers":
        """As the configuration names them."""
        may_order = frozenset(name.lower() for name in schedulers)
        return cls(frozenset(name.lower() for name in observers) | may_order, may_order)

    def recognised(self, said: str, proven: frozenset[str] | None) -> str:
        """The name of who asks; empty where it may not even look. said: what it says it is; proven: whom its
        certificate names, None where there is no TLS."""
        name = said.lower()
        return name if name in self.may_look and (proven is None or name in proven) else ""


NOBODY = Observers()
