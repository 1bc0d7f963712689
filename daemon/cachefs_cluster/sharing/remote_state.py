"""The valid values that another node has published."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cachefs_cluster.sharing.sections import SECTIONS, StateSection
from cachefs_cluster.sharing.wire import MAX_NODE_BYTES, StateChanges

log = logging.getLogger(__name__)

# section, name, value; None: removed
StateChange = tuple[str, str, Any]
# Characters of an invalid value's name and error that the log shows.
_MAX_SHOWN: Final = 200
_NO_VALUES: Final[Mapping[str, Any]] = {}


class RemoteState:
    """The values of one node, decoded and checked. Used from the event loop only."""

    def __init__(self, name: str) -> None:
        """name: of the node, for the log."""
        self.version = 0  # version of the known values; 0: none
        self.rejected_count = 0  # number of rejected values
        self._name = name
        self._values: dict[str, dict[str, Any]] = {}  # by section and name
        self._sizes: dict[tuple[str, str], int] = {}  # bytes of each kept value
        self._size = 0

    def values(self, section: str) -> Mapping[str, Any]:
        """Return the section's values by name."""
        return self._values.get(section, _NO_VALUES)

    def apply(self, changes: StateChanges) -> list[StateChange]:
        """Apply changes. Return the differences: after a full part, repeated values are not among them."""
        old = self._values if changes.full else None
        if changes.full:
            self._values, self._sizes, self._size = {}, {}, 0
        differences = [one for change in changes.changes if (one := self._apply_change(*change)) is not None]
        self.version = changes.version
        return differences if old is None else list(_differences(old, self._values))

    def clear(self) -> list[StateChange]:
        """Drop all values. Return what was removed."""
        gone = self._values
        self._values, self._sizes, self._size, self.version = {}, {}, 0, 0
        return list(_differences(gone, {}))

    def _apply_change(self, section: str, name: str, raw: bytes | None) -> StateChange | None:
        known = SECTIONS.get(section)
        if known is None:  # a section of a later release
            return None
        values = self._values.setdefault(section, {})
        before = values.pop(name, None)
        self._size -= self._sizes.pop((section, name), 0)
        value = self._decode_value(known, name, raw, len(values)) if raw is not None else None
        if value is not None and raw is not None:
            values[name] = value
            size = self._sizes[section, name] = len(raw) + len(name)
            self._size += size
        return (section, name, value) if value != before else None

    def _decode_value(self, section: StateSection[Any], name: str, raw: bytes, others: int) -> Any | None:
        """Decode a value; None if it is rejected."""
        try:
            if others >= section.max_values:
                raise ValueError(f"more than {section.max_values:,} of them")
            if self._size + len(raw) > MAX_NODE_BYTES:
                raise ValueError(f"more than {MAX_NODE_BYTES:,} bytes of one node")
            return section.decode(name, raw)
        except ValueError as error:
            self.rejected_count += 1
            if self.rejected_count & (self.rejected_count - 1) == 0:  # the 1st, 2nd, 4th, 8th
                log.warning(
                    "node %s published an invalid value for %s %r: %s (%d invalid values so far)",
                    self._name, section.name, name[:_MAX_SHOWN], str(error)[:_MAX_SHOWN], self.rejected_count,
                )  # fmt: skip
            return None


def _differences(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> Iterator[StateChange]:
    for section in {**old, **new}:
        before, after = old.get(section, _NO_VALUES), new.get(section, _NO_VALUES)
        for name, value in after.items():
            if before.get(name) != value:
                yield section, name, value
        for name in before:
            if name not in after:
                yield section, name, None
