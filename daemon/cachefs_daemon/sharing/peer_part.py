"""The valid values that another node has published."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cachefs_daemon.sharing.sections import SECTIONS, Section
from cachefs_daemon.sharing.wire import MOST_OF_NODE, Part

log = logging.getLogger(__name__)

# section, name, value; None: removed
News = tuple[str, str, Any]
# Characters of an invalid value's name and error that the log shows.
_SHOWN: Final = 200
_NOTHING: Final[Mapping[str, Any]] = {}


class PeerPart:
    """The values of one node, decoded and checked. Used from the event loop only."""

    def __init__(self, name: str) -> None:
        """name: of the node, for the log."""
        self.version = 0  # version of the known values; 0: none
        self.wrong = 0  # number of rejected values
        self._name = name
        self._values: dict[str, dict[str, Any]] = {}  # by section and name
        self._sizes: dict[tuple[str, str], int] = {}  # bytes of each kept value
        self._size = 0

    def values(self, section: str) -> Mapping[str, Any]:
        """Return the section's values by name."""
        return self._values.get(section, _NOTHING)

    def apply(self, part: Part) -> list[News]:
        """Apply changes. Return the differences: after a full part, repeated values are not among them."""
        old = self._values if part.full else None
        if part.full:
            self._values, self._sizes, self._size = {}, {}, 0
        news = [one for change in part.changes if (one := self._take(*change)) is not None]
        self.version = part.version
        return news if old is None else list(_differences(old, self._values))

    def clear(self) -> list[News]:
        """Drop all values. Return what was removed."""
        gone = self._values
        self._values, self._sizes, self._size, self.version = {}, {}, 0, 0
        return list(_differences(gone, {}))

    def _take(self, section: str, name: str, raw: bytes | None) -> News | None:
        known = SECTIONS.get(section)
        if known is None:  # a section of a later release
            return None
        values = self._values.setdefault(section, {})
        before = values.pop(name, None)
        self._size -= self._sizes.pop((section, name), 0)
        value = self._decoded(known, name, raw, len(values)) if raw is not None else None
        if value is not None and raw is not None:
            values[name] = value
            size = self._sizes[section, name] = len(raw) + len(name)
            self._size += size
        return (section, name, value) if value != before else None

    def _decoded(self, section: Section[Any], name: str, raw: bytes, others: int) -> Any | None:
        """Decode a value; None if it is rejected."""
        try:
            if others >= section.most:
                raise ValueError(f"more than {section.most:,} of them")
            if self._size + len(raw) > MOST_OF_NODE:
                raise ValueError(f"more than {MOST_OF_NODE:,} bytes of one node")
            return section.decode(name, raw)
        except ValueError as error:
            self.wrong += 1
            if self.wrong & (self.wrong - 1) == 0:  # the 1st, 2nd, 4th, 8th
                log.warning(
                    "node %s says of %s %r what is not taken: %s (%d such values so far)",
                    self._name, section.name, name[:_SHOWN], str(error)[:_SHOWN], self.wrong,
                )  # fmt: skip
            return None


def _differences(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> Iterator[News]:
    for section in {**old, **new}:
        before, after = old.get(section, _NOTHING), new.get(section, _NOTHING)
        for name, value in after.items():
            if before.get(name) != value:
                yield section, name, value
        for name in before:
            if name not in after:
                yield section, name, None
