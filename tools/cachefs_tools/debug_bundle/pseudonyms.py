"""Replaces names of datasets, buckets, paths, hosts and users by numbers, consistently throughout a bundle."""

import re
from collections.abc import Iterable
from typing import Any, Final

from cachefs_tools.debug_bundle.redaction import map_texts

# Paths of the system and of cachefs, which reveal nothing about the users.
_SYSTEM: Final = (
    "/dev",
    "/proc",
    "/sys",
    "/run",
    "/var/lib/cachefs",
    "/etc",
    "/usr",
    "/lib",
    "/sbin",
    "/bin",
    "/opt/cachefs",
)
_OF_SYSTEM: Final = re.compile(rf"(?:{'|'.join(map(re.escape, _SYSTEM))})(?:/|\Z)")  # but not /runs, or /library
_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<host>[^/\s'\"]*)(?P<path>/[^\s'\"]*)?")
# A relative path with a file's suffix.
_RELATIVE: Final = re.compile(r"(?<![\w.:/-])[\w@+=-][\w.@+=-]*(?:/[\w.@+=-]+)*/[\w@+=-]+(?:\.[\w@+=-]+)+")
_PATH: Final = re.compile(r"(?<![\w.:/-])/[^\s'\",:;()<>]+")
# By key of a document: the kind of name in its text.
_KINDS: Final = {
    "dataset": "dataset", "spec": "dataset", "subject": "path", "path": "path", "mountpoint": "path",
    "directory": "path", "state_dir": "path", "url": "path", "host": "host", "job": "job", "endpoint_url": "host",
    "key": "path", "zone": "zone", "account": "user", "profile": "user", "consumer": "consumer",
}  # fmt: skip
# Words of cachefs, and names shorter than this, are not searched for in texts.
_MIN_LENGTH: Final = 3
_CACHEFS_WORDS: Final = frozenset(
    ("all", "memory", "ssd", "state", "root", "cachefs", "cachefsd", "localhost", "default")
)


class Pseudonyms:
    """The pseudonyms of one bundle."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # by name
        self._counts: dict[str, int] = {}  # by kind
        self._search: re.Pattern[str] | None = None

    def pseudonym(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name."""
        if name not in self._known:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._known[name] = f"{kind}-{self._counts[kind]}"
            self._search = None
        return self._known[name]

    def add_names(self, kind: str, names: Iterable[str]) -> None:
        """Add names that are to be found in texts."""
        for name in names:
            if name and name not in _CACHEFS_WORDS:
                self.pseudonym(kind, name)

    def replace_in_text(self, text: str) -> str:
        text = _URL.sub(self._url, text)
        text = _PATH.sub(self._path, text)
        text = _RELATIVE.sub(lambda found: self.pseudonym("path", found[0]), text)
        if self._search is None:
            names = sorted((name for name in self._known if len(name) >= _MIN_LENGTH), key=len, reverse=True)
            self._search = re.compile(
                rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, names)) or '(?!)'})(?![A-Za-z0-9])"
            )
        known = self._known
        return self._search.sub(lambda found: known[found[0]], text)

    def replace_in_document(self, value: Any) -> Any:
        return map_texts(value, self.replace_in_text, self._field)

    def _field(self, key: str, item: Any) -> Any:
        kind = _KINDS.get(key)
        if kind is None or not isinstance(item, str) or not item or item in _CACHEFS_WORDS or _OF_SYSTEM.match(item):
            return item
        return self.pseudonym(kind, item)

    def _url(self, found: re.Match[str]) -> str:
        host = self.pseudonym("host", found["host"]) if found["host"] else ""
        path = f"/{self.pseudonym('path', found['path'])}" if (found["path"] or "/") != "/" else ""
        return f"{found['scheme']}://{host}{path}"

    def _path(self, found: re.Match[str]) -> str:
        path = found[0].rstrip(".")
        if _OF_SYSTEM.match(path) or path.startswith(("/path-", "/host-")):
            return found[0]
        return f"/{self.pseudonym('path', path)}{found[0][len(path) :]}"
