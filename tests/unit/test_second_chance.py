"""The second chance of tests that fail beside others, in real runs of pytest with its plugin."""

import os
import subprocess
import sys
from pathlib import Path

from tests.second_chance import LIMIT
from tests.steady import wavering

ROOT = Path(__file__).parents[2]
# Workers of xdist have this variable; a test that runs alone has not.
BEGINNING = """
import os, pytest
beside = "PYTEST_XDIST_WORKER" in os.environ
def test_good(): pass
"""
UNSTEADY = """
def test_unsteady():
    print("what it said")
    assert not beside, "too busy"
"""
UNSTEADY_END = """
@pytest.fixture
def thing():
    yield
    assert not beside
def test_end(thing): pass
"""
# It is the only worker, has finished a file, and has more to do.
CRASH = """
def test_crash():
    if beside: os._exit(1)
def test_behind(): pass
"""
BROKEN = """
def test_broken():
    assert False, "alone" if not beside else "beside"
"""


def run(directory: Path, *files: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit status and the output of a run of these test files."""
    for number, text in enumerate(files):
        (directory / f"test_{number}.py").write_text(BEGINNING + text)
    (directory / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.second_chance", "-n", "2", "--dist", "loadfile", "-p",
         "no:cacheprovider", f"--basetemp={directory / 't'}", *options],
        cwd=directory, env=without_xdist(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
    )  # fmt: skip
    return done.returncode, done.stdout


def without_xdist() -> dict[str, str]:
    """The environment of this process, in which a worker of xdist may run the tests, for a run of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Other plugins take half of the time.
    return own | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}


def last_line(said: str) -> str:
    return said.splitlines()[-1]


def test_what_fails_beside_others_and_passes_alone_is_named(tmp_path: Path) -> None:
    status, said = run(tmp_path, UNSTEADY_END, CRASH, "", options=("-n", "1"))
    assert status == 0, said
    assert "passed, 2 unsteady in " in last_line(said)
    for test, error in (("test_0.py::test_end", "assert not True"), ("test_1.py::test_crash", "    worker 'gw")):
        end = said.partition("= unsteady tests =")[2]
        assert f"{test}: unsteady: failed beside others, passed alone\n    " in end
        assert error in end
    assert sorted(wavering(said)) == ["test_0.py::test_end", "test_1.py::test_crash"]


def test_what_fails_alone_too_fails_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, UNSTEADY + BROKEN, options=("-n", "1"))
    assert status == 1, said
    assert "= 1 failed, 1 passed, 1 unsteady in " in last_line(said)
    assert "test_0.py::test_broken failed again" in said
    assert "AssertionError: alone" in said  # what the second run printed
    assert "FAILED test_0.py::test_broken - AssertionError: beside" in said
    assert "test_0.py::test_unsteady: unsteady" in said
    assert "what it said" in said
    assert sorted(wavering(said)) == ["test_0.py::test_broken", "test_0.py::test_unsteady"]


def test_many_failures_are_not_chance(tmp_path: Path) -> None:
    status, said = run(
        tmp_path, "".join(UNSTEADY.replace("unsteady", f"unsteady_{n}") for n in range(LIMIT + 1)), options=("-n", "1")
    )
    assert status == 1, said
    assert f"= {LIMIT + 1} failed, 1 passed in " in last_line(said)
    assert f"no second chance: {LIMIT + 1} tests failed" in said
    assert len(wavering(said)) == LIMIT + 1


def test_tests_that_did_not_run_are_not_forgotten(tmp_path: Path) -> None:
    # The worker ends, and no other takes its place.
    crash = "def test_crash():\n    if beside: os._exit(1)\ndef test_behind(): pass\n"
    status, said = run(tmp_path, crash, options=("-n", "1", "--max-worker-restart", "0"))
    assert status == 1, said
    assert "no second chance: not all tests could be run" in said


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, BROKEN, "import nothing_of_this_name\n", options=("-n", "1"))
    assert status != 0
    assert "second chance, alone" not in said


def test_a_run_that_passes_says_nothing(tmp_path: Path) -> None:
    status, said = run(tmp_path, UNSTEADY, options=("-n", "0", "-k", "good"))
    assert status == 0, said
    assert "= 1 passed, 1 deselected in " in last_line(said)
    assert "steady" not in said.replace(str(tmp_path), "")
