"""The values that this node publishes, with the version of each change: other nodes are sent only what is new to
them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Removed values that are remembered, so that other nodes learn of the removal without being sent everything again.
MAX_REMOVED: Final = 4096

EncodedChange = tuple[str, str, bytes | None]  # section, name, value; None: removed


@dataclass(frozen=True, slots=True)
class ChangesPage:
    """The changes in one response."""

    # The receiver must drop what it had from this node: the page begins from nothing.
    full: bool
    changes: list[EncodedChange]
    # Version that the receiver has then; its next request names it.
    version: int


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    value: bytes | None


class LocalState:
    """Values by section and name, with a version for each change. Used from the event loop only."""

    def __init__(self) -> None:
        self.version = 1  # version 0 is that of a receiver that has seen nothing
        self.size = 0  # bytes of all values
        self._entries: dict[tuple[str, str], _Entry] = {}  # sorted by version, as each change goes to the end
        self._counts: Counter[str] = Counter()  # values by section
        self._removed = 0  # entries of removed values
        self._oldest_version = 0  # receivers with an earlier version are sent everything

    def set_value(self, section: str, name: str, value: bytes | None) -> bool:
        """Set a value; None removes it. Return whether it changed."""
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
        if self._removed > MAX_REMOVED:
            self._forget_removed()
        return True

    def names(self, section: str) -> list[str]:
        """Return the names of the section's values."""
        return [name for (own, name), entry in self._entries.items() if own == section and entry.value is not None]

    def count(self, section: str) -> int:
        """Return the number of the section's values."""
        return self._counts[section]

    def get_value(self, section: str, name: str) -> bytes | None:
        entry = self._entries.get((section, name))
        return entry.value if entry is not None else None

    def bump_version(self) -> None:
        """Begin a new version without a change of a value, so that all polls are answered."""
        self.version += 1

    def changes_since(self, since: int) -> ChangesPage:
        """Return the changes since a version, in order. A page is never cut: the values of a node fit into one
        response, and a receiver that got everything in parts could miss a removal in between."""
        full = since == 0 or not self._oldest_version <= since <= self.version
        changes = [
            (section, name, entry.value)
            for (section, name), entry in self._entries_after(0 if full else since)
            if not (full and entry.value is None)
        ]
        return ChangesPage(full, changes, self.version)

    def _entries_after(self, version: int) -> Iterator[tuple[tuple[str, str], _Entry]]:
        if not version:
            yield from self._entries.items()
            return
        newer = []
        for key, entry in reversed(self._entries.items()):
            if entry.version <= version:
                break
            newer.append((key, entry))
        yield from reversed(newer)

    def _forget_removed(self) -> None:
        """Forget the older half of the removed values."""
        left = MAX_REMOVED // 2
        for key, entry in list(self._entries.items()):
            if self._removed <= left:
                break
            if entry.value is None:
                del self._entries[key]
                self._removed -= 1
                self._oldest_version = entry.version
