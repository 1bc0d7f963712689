"""Events about pods, and their rate limit."""

from dataclasses import dataclass
from typing import Final, Literal

from cachefs_scheduler.kube.wire import Metadata

# Seconds for which an identical event of a pod is suppressed. The API server forgets events after an hour.
SAID_FOR: Final = 1800.0
# Seconds for which another text with the same reason (such as a queue position) is suppressed.
QUIET: Final = 20.0
# Events per second, and burst.
_RATE: Final = 5.0
_MOST_AT_ONCE: Final = 50.0
_MOST_SAID: Final = 50_000


@dataclass(frozen=True, slots=True)
class Note:
    """An event about a pod, for `kubectl describe pod`."""

    pod: Metadata
    reason: str
    text: str
    type: Literal["Normal", "Warning"] = "Normal"


class Sieve:
    """Limits and deduplicates events. `now`: monotonic seconds."""

    def __init__(self) -> None:
        # By uid and reason: text and time.
        self._said: dict[tuple[str, str], tuple[str, float]] = {}
        self._left = _MOST_AT_ONCE
        self._at = 0.0

    def passes(self, note: Note, now: float) -> bool:
        """Return whether the event is new and within the rate limit."""
        key = (note.pod.uid, note.reason)
        text, at = self._said.get(key, ("", -SAID_FOR))
        if now - at < (SAID_FOR if text == note.text else QUIET):
            return False
        self._left = min(_MOST_AT_ONCE, self._left + max(0.0, now - self._at) * _RATE)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        if len(self._said) >= _MOST_SAID:
            self._said = {key: said for key, said in self._said.items() if now - said[1] < QUIET}
        self._said[key] = (note.text, now)
        return True
