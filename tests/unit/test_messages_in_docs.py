"""The texts that docs/troubleshooting.md explains are texts that the code prints."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = ("docs/troubleshooting.md", "docs/tls-and-credentials.md")
SOURCES = ("cachefs", "daemon", "scheduler_plugin", "tools")
GAP = "…"
# What is printed by others, and names of commands, settings and columns. Shorter pieces are in too many texts to tell.
SHORTEST = 12
NO_MESSAGE = re.compile(r"(cachectl|mount\.cachefs|cachefsd|dataset) .*|[A-Z]+|[\w.]*|…\.sock\.ch, user …")
ROW = re.compile(r"^\| (`.*?) \|", re.MULTILINE)


def text_of(node: ast.expr) -> str:
    """What a literal prints, with a gap for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    assert isinstance(node, ast.JoinedStr)
    return "".join(text_of(part) if isinstance(part, ast.Constant) else GAP for part in node.values)


@cache
def printed() -> str:
    """All texts in the code, one after the other."""
    found = []
    for source in SOURCES:
        for path in sorted((REPOSITORY / source).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant | ast.JoinedStr):
                    found.append(re.sub(r"%[.\d]*[a-z]", GAP, text_of(node)))
    return "\n".join(found)


def messages(page: str) -> Iterator[str]:
    for row in ROW.findall((REPOSITORY / page).read_text()):
        yield from (text for text in re.findall(r"`([^`]+)`", row) if not NO_MESSAGE.fullmatch(text))


@pytest.mark.parametrize(("page", "message"), [(page, message) for page in PAGES for message in messages(page)])
def test_the_code_prints_it(page: str, message: str) -> None:
    pieces = [piece.strip() for piece in re.split(r"…|\(…\)", message)]
    unknown = [piece for piece in pieces if len(piece) >= SHORTEST and piece not in printed()]
    assert not unknown, f"{page} explains {unknown}, which nothing prints"


def test_messages_are_found_at_all() -> None:
    assert len(list(messages("docs/troubleshooting.md"))) > 50
