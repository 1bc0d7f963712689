"""Which pages the site has, and in which order: what navigation.toml says, with its patterns filled in."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
HOME: Final = "docs/index.md"


@dataclass(frozen=True, slots=True)
class Reader:
    """A group of pages for one kind of reader; paths are relative to the repository."""

    name: str
    pages: tuple[str, ...]


def readers() -> list[Reader]:
    """As the file has them. Raises ValueError where a pattern or a path matches no page."""
    groups = tomllib.loads((Path(__file__).parent / "navigation.toml").read_text())["reader"]
    return [Reader(group["name"], tuple(page for path in group["pages"] for page in _pages(path))) for group in groups]


def _pages(path: str) -> list[str]:
    found = sorted(str(page.relative_to(REPOSITORY)) for page in REPOSITORY.glob(path))
    if not found:
        raise ValueError(f"navigation.toml: there is no page {path}")
    return found
