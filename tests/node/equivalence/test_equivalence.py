"""Every set-up computes, prints, leaves open and leaves behind the same with and without `cachefs run`."""

import ast
import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachefs.run import STARTUP_DIRECTORY
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.equivalence.datasets import FILES
from tests.node.equivalence.library_setups import LIBRARY_SETUPS, WRITE_MDS
from tests.node.equivalence.own_code_setups import OWN_CODE_SETUPS
from tests.node.equivalence.process_setups import PROCESS_SETUPS
from tests.node.equivalence.setups import SETUPS
from tests.warm_python import WarmPython

# All set-ups together take a minute of a processor; on a machine with a load of 25 that was five minutes.
pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
# Faults that are put into the hooks, and the set-up that shows each.
FAULTS = {
    "draw": "shuffle", "replace": "sequential", "leak": "own", "ask": "length-counted", "swallow": "timers",
    "close": "logs", "number": "closed",
}  # fmt: skip
# Set-ups with a process of their own: they change it, or are about its children, its threads or its end.
ALONE = [
    *PROCESS_SETUPS, *FAULTS.values(), "shared-memory", "store", "from-queue", "spawned", "forkserver", "stream",
    "signals", "forks", "threads", "exits", "killed", "no-children",
]  # fmt: skip
# These two import the same large part of torch.
COMPILING = ["compiled", "trained"]
# Others go through loaders, and leave nothing behind: so many of them share a process.
SHARING = 24
ALL = [*SETUPS, *PROCESS_SETUPS, *OWN_CODE_SETUPS]
# That has the libraries of the programs: `make programs`.
PYTHON = os.environ.get("PROGRAMS_PYTHON")
# Of the jobs: any Python that has torch.
JOB_PYTHON = os.environ.get("EQUIVALENCE_PYTHON", sys.executable)
CACHEFS = Path(sys.executable).with_name("cachefs")
ENVIRONMENT = {**os.environ, "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Node:
    socket: Path
    root: Path
    torch_jobs: WarmPython

    def run(self, *command: str | Path, name: str = "equivalence") -> list[str]:
        return [str(CACHEFS), "run", "--job", name, "--socket", str(self.socket), "--", *map(str, command)]

    def start(
        self,
        out: Path,
        processes: Sequence[str],
        *,
        watched: bool,
        extra: Mapping[str, str] | None = None,
        python: str = JOB_PYTHON,
    ) -> "subprocess.Popen[str]":
        """Run set-ups, those of each item in one process. What is seen of them lies in *out*."""
        out.mkdir()
        command = [python, str(HERE / "warm_process.py"), str(self.root), str(out), *processes]
        line = self.run(*command) if watched else command
        pipes = {"env": {**ENVIRONMENT, **(extra or {})}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if python == sys.executable:
            return self.torch_jobs.start(line, **pipes)
        return subprocess.Popen(line, text=True, **pipes)  # type: ignore[no-any-return,call-overload]


@pytest.fixture(scope="module")
def node(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        path = top / f"class{number % 5}" / f"{number:03}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    if PYTHON:
        subprocess.run([PYTHON, "-c", WRITE_MDS, str(top)], check=True, timeout=100)
    with Daemon(tmp_path_factory.mktemp("node")) as daemon:
        daemon.add_dataset("numbers", f"file://{top}")
        with mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers") as mount:
            yield Node(daemon.socket, mount, torch_jobs)


def processes() -> list[str]:
    """The set-ups of each process."""
    others = [name for name in ALL if name not in (*ALONE, *COMPILING)]
    shared = [others[first : first + SHARING] for first in range(0, len(others), SHARING)]
    return [*map(",".join, [*shared, COMPILING]), *dict.fromkeys(ALONE)]


@pytest.fixture(scope="module")
def seen(node: Node, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What was seen of all set-ups: without `cachefs run`, and with it."""
    top = tmp_path_factory.mktemp("seen")
    both = [node.start(top / name, processes(), watched=name == "watched") for name in ("alone", "watched")]
    for process in both:
        said, _ = process.communicate(timeout=800)
        assert process.returncode == 0, said
    return top / "alone", top / "watched"


def differences(alone: Path, watched: Path) -> list[str]:
    """Lines that differ in what was seen of one set-up."""
    found: list[str] = []
    for name in sorted({path.name for place in (alone, watched) for path in place.iterdir()}):
        one, other = lines(alone / name), lines(watched / name)
        if one != other:
            found += difflib.unified_diff(one, other, f"{name} alone", f"{name} watched", lineterm="", n=1)
    return found


def lines(path: Path) -> list[str]:
    """What a file says, but for what cachefs may say and change."""
    if not path.exists():
        return ["nothing"]
    text = path.read_bytes().decode(errors="backslashreplace").replace(str(path.parent.parent), "OUT")
    text = re.sub(r"\(pid=\d+\)", "(pid)", text)  # Python 3.12 has it in a warning
    if path.name == "state":
        found = json.loads(text)
        environment = found["environment"]
        kept = [part for part in environment.pop("PYTHONPATH", "").split(":") if not part.endswith("/hooks/startup")]
        found["environment"] = {**environment, "PYTHONPATH": ":".join(kept)}
        text = json.dumps(found, indent=1, sort_keys=True)
    return [line for line in text.splitlines() if not line.startswith("cachefs: ")]


@pytest.mark.parametrize("name", ALL)
def test_a_set_up_is_the_same(seen: tuple[Path, Path], name: str) -> None:
    alone, watched = (place / name for place in seen)
    assert (alone / "status").exists()
    assert differences(alone, watched) == []


@pytest.fixture(scope="module")
def seen_of_libraries(node: Node, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same of the set-ups that need the programs' libraries, one after the other: the library of MDS looks
    at what other processes of it share, and leaves that open."""
    assert PYTHON, "PROGRAMS_PYTHON does not name an interpreter: see make programs"
    top = tmp_path_factory.mktemp("libraries")
    extra = {"HF_HOME": str(top / "home"), "HF_HUB_OFFLINE": "1", "EQUIVALENCE_AT_ONCE": "1"}
    for name in ("alone", "watched"):
        process = node.start(top / name, list(LIBRARY_SETUPS), watched=name == "watched", extra=extra, python=PYTHON)
        said, _ = process.communicate(timeout=800)
        assert process.returncode == 0, said
    return top / "alone", top / "watched"


@pytest.mark.programs
@pytest.mark.parametrize("name", LIBRARY_SETUPS)
def test_a_set_up_with_a_large_library_is_the_same(seen_of_libraries: tuple[Path, Path], name: str) -> None:
    alone, watched = (place / name for place in seen_of_libraries)
    assert (alone / "status").read_text() == "0", (alone / "stderr").read_text()
    assert differences(alone, watched) == []


def test_a_process_starts_and_ends_the_same(node: Node, tmp_path: Path) -> None:
    """It has a sitecustomize, and runs inside two `cachefs run`. How PYTHONPATH changes is in tests/unit/publishing."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("zz_theirs = 1")
    environment = {**ENVIRONMENT, "PYTHONPATH": f":{tmp_path / 'theirs'}"}
    alone: list[str] = [JOB_PYTHON, str(HERE / "whole_process.py"), str(node.root)]
    watched = node.run(*node.run(*alone))
    both = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
        for line in (alone, watched)
    ]
    said = [process.communicate(timeout=300) for process in both]
    stderr = [[line for line in text.splitlines() if not line.startswith("cachefs: ")] for _, text in said]
    assert said[0][0] == said[1][0]
    assert stderr[0] == stderr[1]
    assert [process.returncode for process in both] == [1, 1]


def test_what_every_python_loads_is_written_for_the_oldest() -> None:
    """A job may start a Python 2.7, which loads the file too, and no machine of today has one to try it with."""
    source = (STARTUP_DIRECTORY / "sitecustomize.py").read_bytes()
    nodes = list(ast.walk(ast.parse(source.decode("ascii"))))
    newer = (
        ast.AnnAssign, ast.AsyncFor, ast.AsyncFunctionDef, ast.AsyncWith, ast.Await, ast.JoinedStr, ast.Match,
        ast.NamedExpr, ast.Nonlocal, ast.Starred, ast.TryStar, ast.YieldFrom,
    )  # fmt: skip
    assert [ast.unparse(node) for node in nodes if isinstance(node, newer)] == []
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            given = node.args
            annotations = [node.returns, *(one.annotation for one in given.args)]
            assert [given.posonlyargs, given.kwonlyargs, [one for one in annotations if one]] == [[], [], []], node.name
        assert not (isinstance(node, ast.Raise) and node.cause)
        assert not (isinstance(node, ast.ClassDef) and node.keywords)


def test_the_hooks_were_there(seen: tuple[Path, Path]) -> None:
    """Else everything would be equal, and nothing shown."""
    said = (seen[1] / "stream" / "stderr").read_text()
    assert "cachefs: loader Stream (setups.py:" in said


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_a_fault_is_found(node: Node, seen: tuple[Path, Path], tmp_path: Path, fault: str, name: str) -> None:
    process = node.start(tmp_path / fault, [name], watched=True, extra={"EQUIVALENCE_FAULT": fault})
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert differences(seen[0] / name, tmp_path / fault / name)
