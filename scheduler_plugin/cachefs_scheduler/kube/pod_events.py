"""Events about pods, and their rate limit."""

from dataclasses import dataclass
from typing import Final, Literal

from cachefs_scheduler.kube.kube_messages import ObjectMetadata

# Seconds for which an identical event of a pod is suppressed. The API server forgets events after an hour.
REPEAT_SECONDS: Final = 1800.0
# Seconds for which another text with the same reason (such as a queue position) is suppressed.
SAME_REASON_SECONDS: Final = 20.0
# Events per second, and burst.
_RATE: Final = 5.0
_MAX_BURST: Final = 50.0
_MAX_REMEMBERED: Final = 50_000


@dataclass(frozen=True, slots=True)
class PodEvent:
    """An event about a pod, for `kubectl describe pod`."""

    pod: ObjectMetadata
    reason: str
    text: str
    type: Literal["Normal", "Warning"] = "Normal"


class EventLimiter:
    """Limits and deduplicates events. `now`: monotonic seconds."""

    def __init__(self) -> None:
        # By uid and reason: text and time.
        self._written: dict[tuple[str, str], tuple[str, float]] = {}
        self._tokens = _MAX_BURST
        self._refilled_at = 0.0

    def can_write(self, note: PodEvent, now: float) -> bool:
        """Return whether the event is new and within the rate limit."""
        key = (note.pod.uid, note.reason)
        text, at = self._written.get(key, ("", -REPEAT_SECONDS))
        if now - at < (REPEAT_SECONDS if text == note.text else SAME_REASON_SECONDS):
            return False
        self._tokens = min(_MAX_BURST, self._tokens + max(0.0, now - self._refilled_at) * _RATE)
        self._refilled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        if len(self._written) >= _MAX_REMEMBERED:
            self._written = {key: said for key, said in self._written.items() if now - said[1] < SAME_REASON_SECONDS}
        self._written[key] = (note.text, now)
        return True
