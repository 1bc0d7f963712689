"""A problem that lasts is logged when it begins, once in a while, and when it is over."""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

_EVERY: Final = 300.0  # seconds
_MOST: Final = 64


@dataclass
class FewLines:
    """Problems have names; what is said of one may differ."""

    log: logging.Logger
    _said: dict[str, float] = field(default_factory=dict)

    def error(self, name: str, text: str, *values: object) -> None:
        """It is there."""
        now = time.monotonic()
        if now - self._said.get(name, -_EVERY) >= _EVERY and (name in self._said or len(self._said) < _MOST):
            self._said[name] = now
            self.log.error(text, *values)

    def good(self, name: str) -> None:
        """It is not there, or no longer."""
        if self._said.pop(name, None) is not None:
            self.log.warning("%s: all is well again", name)
