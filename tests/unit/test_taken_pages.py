"""Tests that count pages have several tries, where the machine takes pages, and one elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os
from tests import taken_pages
def pytest_runtest_protocol(item, nextitem):
    taken_pages.run(item, nextitem)
    return True
taken_pages._Watched.seen = lambda *_: os.environ["MACHINE"] == "takes pages"
"""
TESTS = """
import pytest
tries = []
@pytest.fixture
def fresh(): return []
@pytest.fixture(scope="module")
def node(): return []
def test_third(fresh, node):
    tries.append(1)
    for fixture in (fresh, node):
        fixture.append("a dataset")
        assert fixture == ["a dataset"]
    assert len(tries) > 2, "too few pages"
def test_same_node(node):
    node.append("another")
    assert len(node) == 2
def test_never():
    assert False, "no pages"
"""


@pytest.mark.parametrize(
    ("machine", "last"),
    [("takes pages", "1 failed, 2 passed, 6 warnings in "), ("leaves them", "2 failed, 1 passed in ")],
)
def test_a_test_that_counts_pages_has_several_tries(tmp_path: Path, machine: str, last: str) -> None:
    for name, text in (("conftest.py", CONFTEST), ("test_pages.py", TESTS), ("pytest.ini", "[pytest]\n")):
        (tmp_path / name).write_text(text)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"PYTHONPATH": str(ROOT), "MACHINE": machine, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True,
        env=own, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert last in done.stdout.splitlines()[-1], done.stdout
    assert "assert False" in done.stdout
