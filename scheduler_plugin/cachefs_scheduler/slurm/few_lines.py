"""Rate-limits log lines of a lasting problem: logs its begin, its end, and a reminder in between."""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

_EVERY: Final = 300.0  # seconds between reminders
_MOST: Final = 64


@dataclass
class FewLines:
    """Open problems by name; the text of a problem may vary."""

    log: logging.Logger
    _said: dict[str, float] = field(default_factory=dict)

    def error(self, name: str, text: str, *values: object) -> None:
        """Report the problem as present."""
        now = time.monotonic()
        if now - self._said.get(name, -_EVERY) >= _EVERY and (name in self._said or len(self._said) < _MOST):
            self._said[name] = now
            self.log.error(text, *values)

    def good(self, name: str) -> None:
        """Report the problem as absent or solved."""
        if self._said.pop(name, None) is not None:
            self.log.warning("%s: all is well again", name)
