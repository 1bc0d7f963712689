"""What this node publishes, with the version at which each value changed: so that each other node is sent what it has
not seen."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Removed values that are remembered, so that others need not be sent everything anew to learn that they are gone.
MOST_REMOVED: Final = 4096

Change = tuple[str, str, bytes | None]  # section, name, value; None: it is gone


@dataclass(frozen=True, slots=True)
class Page:
    """What one answer says."""

    # What the receiver had from this node before is not to be relied on: this begins from nothing.
    full: bool
    changes: list[Change]
    # What the receiver knows then; it asks with it the next time.
    version: int


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    value: bytes | None


class OwnPart:
    """Values by section and name, each change with a version of its own. Used from the event loop only."""

    def __init__(self) -> None:
        self.version = 1  # a receiver that says 0 has seen nothing
        self.size = 0  # bytes of all values
        self._entries: dict[tuple[str, str], _Entry] = {}  # by version, as each change goes to the end
        self._counts: Counter[str] = Counter()  # values by section
        self._removed = 0  # entries that are there only since others have to learn that they are gone
        self._known_since = 0  # who has seen less has to be sent everything

    def set(self, section: str, name: str, value: bytes | None) -> bool:
        """The value is this one now; None: there is none. Returns whether that is news."""
        before = self._entries.get((section, name))
        size = len(before.value or b"") if before is not None else 0
        if (before.value if before is not None else None) == value:
            return False
        if before is not None:
            del self._entries[section, name]
            self._removed -= before.value is None
        self._counts[section] += (value is not None) - (before is not None and before.value is not None)
        self.version += 1
        self._entries[section, name] = _Entry(self.version, value)
        self._removed += value is None
        self.size += len(value or b"") - size
        if self._removed > MOST_REMOVED:
            self._forget_removed()
        return True

    def names(self, section: str) -> list[str]:
        """Of the values that there are."""
        return [name for (own, name), entry in self._entries.items() if own == section and entry.value is not None]

    def count(self, section: str) -> int:
        """Count the values that there are."""
        return self._counts[section]

    def get(self, section: str, name: str) -> bytes | None:
        entry = self._entries.get((section, name))
        return entry.value if entry is not None else None

    def touch(self) -> None:
        """There is news which is no value: everybody gets an answer."""
        self.version += 1

    def page(self, since: int) -> Page:
        """What has changed since that version, in order. It is never cut: what a node may have fits into an answer, and
        a receiver that is given everything in parts could miss what is removed meanwhile."""
        full = since == 0 or not self._known_since <= since <= self.version
        changes = [
            (section, name, entry.value)
            for (section, name), entry in self._after(0 if full else since)
            if not (full and entry.value is None)
        ]
        return Page(full, changes, self.version)

    def _after(self, version: int) -> Iterator[tuple[tuple[str, str], _Entry]]:
        if not version:
            yield from self._entries.items()
            return
        news = []
        for key, entry in reversed(self._entries.items()):
            if entry.version <= version:
                break
            news.append((key, entry))
        yield from reversed(news)

    def _forget_removed(self) -> None:
        """The older half."""
        left = MOST_REMOVED // 2
        for key, entry in list(self._entries.items()):
            if self._removed <= left:
                break
            if entry.value is None:
                del self._entries[key]
                self._removed -= 1
                self._known_since = entry.version
