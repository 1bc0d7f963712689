"""Counts what makes the product hard to read, and fails where a count has grown: part of `make lint`.

Three kinds are counted: words that stand in place of a noun, docstrings that begin with a question, and public types
whose name stands in more than one module. wording.json holds the counts that are allowed. They may only fall: where one
has fallen, `python -m tests.wording --write` notes it.
"""

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
ALLOWED: Final = REPOSITORY / "tests" / "wording.json"
PACKAGES: Final = ("cachefs", "daemon", "scheduler_plugin", "tools")

_AVOIDED: Final = re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", re.IGNORECASE)
_QUESTION: Final = re.compile(r"(?:Who|Whom|Whose|What|Where|Which|When|How|Those|Of|It|Is|Does|May|Can|Are|Will)\b")


def avoided_words(texts: dict[Path, str]) -> Iterator[str]:
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            yield from (f"{path}:{number}: {word}" for word in _AVOIDED.findall(line))


def question_docstrings(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and _QUESTION.match(text):
                    yield f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def repeated_types(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yields each public type name that several modules define, once."""
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path))
    yield from (f"{name}: {', '.join(paths)}" for name, paths in sorted(modules.items()) if len(paths) > 1)


def find() -> dict[str, list[str]]:
    """Returns, for each kind, a line per place."""
    code = {path: path.read_text() for package in PACKAGES for path in sorted(REPOSITORY.glob(f"{package}/**/*.py"))}
    docs = {path: path.read_text() for path in (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md")))}
    code = {path.relative_to(REPOSITORY): text for path, text in code.items()}
    docs = {path.relative_to(REPOSITORY): text for path, text in docs.items()}
    trees = {path: ast.parse(text) for path, text in code.items()}
    return {
        "avoided words in the product": list(avoided_words(code)),
        "avoided words in the docs": list(avoided_words(docs)),
        "docstrings that begin with a question": list(question_docstrings(trees)),
        "type names that several modules define": list(repeated_types(trees)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="note the counts where they have fallen")
    parser.add_argument("--show", action="store_true", help="print each place")
    options = parser.parse_args()
    allowed: dict[str, int] = json.loads(ALLOWED.read_text())
    findings = find()
    status = 0
    for kind, places in findings.items():
        grown = len(places) > allowed[kind]
        if options.show or grown:
            print(*places, sep="\n")
        if grown:
            print(f"{len(places)} {kind}, and {allowed[kind]} before: see the lines above")
            status = 1
    if options.write and status == 0:
        ALLOWED.write_text(json.dumps({kind: len(places) for kind, places in findings.items()}, indent=4) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
