"""docs/architecture.md, the walks of docs/how-it-works.md and the index of docs/decisions stay true: what they name
exists, and they name all there is."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
# By import name, the directory in which the import package lies.
WINGS = {
    "cachefs": "",
    "cachefs_cluster": "daemon",
    "cachefs_daemon": "daemon",
    "cachefsd": "daemon",
    "cachefs_scheduler": "scheduler_plugin",
    "cachefs_tools": "tools",
    "cachefs_bench": "tools",
}
PACKAGE_LAYOUT = [REPOSITORY / directory / name for name, directory in WINGS.items()]
FILE_ENDINGS = (".c", ".cfg", ".md", ".py", ".service", ".toml", ".yaml", ".yml")


def names() -> list[str]:
    """What stands between backticks on the page, in order, each once."""
    return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", PAGE.read_text())))


def is_path(name: str) -> bool:
    """A path has a file's ending, or ends as a directory does. `.cachefs/publish` is none: it is a file of mounts."""
    return " " not in name and name.endswith((*FILE_ENDINGS, "/")) and name != "__init__.py"


def is_module(name: str) -> bool:
    return re.fullmatch(rf"({'|'.join(WINGS)})(\.\w+)*", name) is not None


def file_of(module: str) -> Path:
    """Where a module or a package lies, without ending."""
    return REPOSITORY / WINGS[module.partition(".")[0]] / module.replace(".", "/")


def packages() -> Iterator[str]:
    for wing in PACKAGE_LAYOUT:
        for marker in sorted(wing.rglob("__init__.py")):
            yield ".".join(marker.parent.relative_to(wing.parent).parts)


def links() -> list[str]:
    """Files that the page links to, relative to the page's directory."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text())
    return [target for target in dict.fromkeys(targets) if "://" not in target]


@pytest.mark.parametrize("path", [name for name in names() if is_path(name)])
def test_every_file_named_exists(path: str) -> None:
    assert (REPOSITORY / path).exists(), f"docs/architecture.md names {path}, which does not exist"


@pytest.mark.parametrize("module", [name for name in names() if is_module(name)])
def test_every_module_named_exists(module: str) -> None:
    place = file_of(module)
    assert (place / "__init__.py").exists() or place.with_suffix(".py").exists(), (
        f"docs/architecture.md names {module}, which does not exist"
    )


@pytest.mark.parametrize("package", list(packages()))
def test_every_package_is_named(package: str) -> None:
    assert package in names(), f"docs/architecture.md has no room for the package {package}; add it to the table Rooms"


def test_every_module_begins_with_a_sentence_about_itself() -> None:
    modules = [path for wing in PACKAGE_LAYOUT for path in sorted(wing.rglob("*.py"))]
    first_lines = {str(path.relative_to(REPOSITORY)): path.read_text().partition("\n")[0] for path in modules}
    without = [path for path, line in first_lines.items() if not re.match(r'r?"""[\w`\[]', line)]
    assert without == [], "`head -n 1` shows a developer what each module of a room is"


@pytest.mark.parametrize("target", links())
def test_every_link_leads_somewhere(target: str) -> None:
    assert (PAGE.parent / target).exists()


def test_the_page_names_files_at_all() -> None:
    """Else the tests above would pass for a page they cannot read."""
    assert len([name for name in names() if is_path(name)]) > 100
    assert len(list(packages())) > 20


class WalkStep(NamedTuple):
    number: int
    path: str
    functions: list[str]


def walks() -> dict[str, str]:
    """The walks of docs/how-it-works.md, each as one line per paragraph or step, by heading."""
    page = (REPOSITORY / "docs" / "how-it-works.md").read_text()
    section = page.partition("\n## The walk of a read\n")[2].partition("\n## ")[0]
    unwrapped = re.sub(r"(?<=\S)\n(?!\n|\d+\. |#)\s*", " ", section)
    parts = re.split(r"^### (.+)$", unwrapped, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def steps(walk: str) -> list[WalkStep]:
    found = re.findall(r"^(\d+)\. `([^`]+)`: ((?:`[^`]+`(?:, )?)+) -> .", walk, re.MULTILINE)
    return [WalkStep(int(number), path, re.findall(r"`([^`]+)`", names)) for number, path, names in found]


@cache
def definitions(path: str) -> frozenset[str]:
    """The names that a module defines: functions, classes and their methods, as `Class.method`, and constants."""
    found = set()
    for node in ast.parse((REPOSITORY / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            found.update(one.id for one in ast.walk(node) if isinstance(one, ast.Name))
    return frozenset(found)


@pytest.mark.parametrize("walk", walks())
def test_every_function_of_a_walk_exists(walk: str) -> None:
    missing = [
        f"{step.number}: {step.path}: {name}"
        for step in steps(walks()[walk])
        for name in step.functions
        if not (REPOSITORY / step.path).is_file() or name not in definitions(step.path)
    ]
    assert missing == [], f"the walk {walk!r} of docs/how-it-works.md names what does not exist"


@pytest.mark.parametrize("walk", walks())
def test_the_steps_of_a_walk_are_numbered_and_counted(walk: str) -> None:
    found = steps(walks()[walk])
    numbers = re.findall(r"^\d+\. ", walks()[walk], re.MULTILINE)
    assert len(found) == len(numbers), "a step is not written as `file`: `function` -> text"
    assert [step.number for step in found] == list(range(1, len(found) + 1))
    stated = re.search(r"^Files: (\d+)", walks()[walk], re.MULTILINE)
    assert stated is not None
    assert int(stated[1]) == len({step.path for step in found})


@pytest.mark.parametrize("walk", walks())
def test_the_forms_of_a_walk_exist_and_are_counted(walk: str) -> None:
    stated = re.search(r"Forms: (\d+): (.*)$", walks()[walk], re.MULTILINE)
    assert stated is not None
    forms = list(dict.fromkeys(re.findall(r"`([^`]+)`", stated[2])))
    assert int(stated[1]) == len(forms)
    modules = [str(path.relative_to(REPOSITORY)) for wing in PACKAGE_LAYOUT for path in wing.rglob("*.py")]
    # Some files of the hooks are for Pythons whose syntax this one may not know.
    known = frozenset().union(*(definitions(path) for path in modules if "startup" not in path))
    assert [form for form in forms if form not in known] == []


def test_there_are_four_walks() -> None:
    assert len(walks()) == 4


def test_every_decision_is_in_the_index() -> None:
    decisions = REPOSITORY / "docs" / "decisions"
    index = (decisions / "README.md").read_text()
    pages = [page.name for page in sorted(decisions.glob("[0-9]*.md"))]
    assert [page for page in pages if f"]({page})" not in index] == []
    assert [page[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
