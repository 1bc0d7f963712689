"""check_offline.py SITE: the built site loads nothing from other servers; who reads it needs no network."""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

_FOREIGN: Final = re.compile(r"(?:https?:)?//", re.IGNORECASE)
_IN_STYLE: Final = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
# What a browser loads by itself; `link` only where it is no mere reference.
_LOADS: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}


class _Loaded(HTMLParser):
    """Collects addresses on other servers that the page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(_LOADS.get(tag, "")) or ""
        if _FOREIGN.match(address):
            self.foreign.append(address)


def foreign(site: Path) -> Iterator[tuple[Path, str]]:
    """File of the site, and the address on another server that it loads."""
    for page in sorted(site.rglob("*.html")):
        loaded = _Loaded()
        loaded.feed(page.read_text())
        yield from ((page, address) for address in loaded.foreign)
    for style in sorted(site.rglob("*.css")):
        yield from ((style, address) for address in _IN_STYLE.findall(style.read_text()))


if __name__ == "__main__":
    found = list(foreign(Path(sys.argv[1])))
    for file, address in found:
        print(f"{file} loads {address}", file=sys.stderr)
    sys.exit(1 if found else 0)
