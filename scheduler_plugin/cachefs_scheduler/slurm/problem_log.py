"""Rate-limits log lines of a lasting problem: logs its begin, its end, and a reminder in between."""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

_REMINDER_SECONDS: Final = 300.0  # seconds between reminders
_MAX_PROBLEMS: Final = 64


@dataclass
class ProblemLog:
    """Open problems by name; the text of a problem may vary."""

    log: logging.Logger
    _logged_at: dict[str, float] = field(default_factory=dict)

    def report_problem(self, name: str, text: str, *values: object) -> None:
        """Report the problem as present."""
        now = time.monotonic()
        if now - self._logged_at.get(name, -_REMINDER_SECONDS) >= _REMINDER_SECONDS and (
            name in self._logged_at or len(self._logged_at) < _MAX_PROBLEMS
        ):
            self._logged_at[name] = now
            self.log.error(text, *values)

    def report_solved(self, name: str) -> None:
        """Report the problem as absent or solved."""
        if self._logged_at.pop(name, None) is not None:
            self.log.warning("%s: the problem is solved", name)
