"""Which exceptions in code of cachefs are the job's own."""

import ast
import contextlib
import ctypes
import functools
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from cachefs.publishing import job_exceptions
from cachefs.publishing.job_exceptions import is_from_job, mode_of, real_path, suppress_own


class Late(Exception):
    """The job's own."""


def raising(error: BaseException) -> None:
    raise error


class Callables:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    def method(self, number: int, frame: FrameType | None) -> None:
        self.further(frame)

    def further(self, frame: FrameType | None) -> None:
        raise TimeoutError


def with_reason(reason: str, number: int, frame: FrameType | None) -> None:
    raise RuntimeError(reason)


@pytest.fixture(params=["any", "lambda", "object", "method", "partial", "wrapped"])
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Late

    @functools.wraps(ring)
    def wrapped(*given: Any, **named: Any) -> None:
        ring()

    handlers: dict[str, Callable[[int, FrameType | None], Any]] = {
        "any": ring,
        "lambda": lambda number, frame: raising(ValueError("late")),
        "object": Callables(),
        "method": Callables().method,
        "partial": functools.partial(with_reason, "late"),
        "wrapped": wrapped,
    }
    before = signal.signal(signal.SIGUSR2, handlers[request.param])
    yield
    signal.signal(signal.SIGUSR2, before)


def caught(run: Callable[[], object]) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_a_signal_handler_raises_is_foreign(handler: None) -> None:
    assert is_from_job(caught(lambda: signal.raise_signal(signal.SIGUSR2)))
    assert is_from_job(caught(lambda: list(map(signal.raise_signal, [signal.SIGUSR2]))))


def test_failures_of_cachefs_and_of_what_it_calls_are_its_own() -> None:
    class Dataset:
        def __len__(self) -> int:
            raise Late

    assert not is_from_job(caught(lambda: 1 // 0))
    assert not is_from_job(caught(lambda: os.stat("/absent")))
    assert not is_from_job(caught(lambda: len(Dataset())))
    assert not is_from_job(caught(lambda: raising(Late())))


def test_what_a_trace_function_raises_is_foreign() -> None:
    def trace(frame: FrameType, event: str, given: Any) -> None:
        raise Late

    def traced() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            len([])
            caught(lambda: None)
        finally:
            sys.settrace(before)

    assert is_from_job(caught(traced))


def of_cachefs(source: str) -> CodeType:
    """Code that counts as cachefs' own."""
    return compile(source, job_exceptions.__file__, "exec")


def test_what_another_thread_has_raised_here_is_foreign() -> None:
    code = of_cachefs("try:\n    send(thread, late)\n    len([])\nexcept Exception as error: found = error")
    names: dict[str, Any] = {
        "send": ctypes.pythonapi.PyThreadState_SetAsyncExc,
        "thread": ctypes.c_ulong(threading.get_ident()),
        "late": ctypes.py_object(Late),
    }
    exec(code, names)
    assert type(names["found"]) is Late
    assert is_from_job(names["found"])


@pytest.mark.parametrize(
    ("close", "is_the_jobs"),
    [
        # It comes in a function of the standard library, once the call returns.
        (
            functools.partial(
                ctypes.pythonapi.PyThreadState_SetAsyncExc,
                ctypes.c_ulong(threading.get_ident()),
                ctypes.py_object(Late),
            ),
            True,
        ),
        (lambda: raising(Late()), False),  # code of the job that cachefs has called
    ],
)
def test_what_another_thread_has_raised_in_the_standard_library_is_foreign(
    close: Callable[[], Any], is_the_jobs: bool
) -> None:
    names: dict[str, Any] = {"closing": contextlib.closing, "thing": SimpleNamespace(close=close)}
    exec(of_cachefs("try:\n    with closing(thing): pass\nexcept Exception as error: found = error"), names)
    assert type(names["found"]) is Late
    assert is_from_job(names["found"]) is is_the_jobs


def test_only_own_exceptions_are_suppressed(handler: None) -> None:
    with suppress_own(OSError):
        os.stat("/absent")
    with pytest.raises((Late, ValueError, TimeoutError, RuntimeError)), suppress_own(Exception):
        signal.raise_signal(signal.SIGUSR2)
    with pytest.raises(KeyError), suppress_own(OSError):
        raise KeyError


@pytest.mark.parametrize("error", [TimeoutError, OSError, ValueError, KeyError])
@pytest.mark.parametrize("ask", [mode_of, real_path])
def test_no_answer_on_a_path_takes_what_a_handler_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ask: Callable[[str], object], error: type[Exception]
) -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise error

    def interrupted(path: object, **_: object) -> None:
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, ring)
    try:
        monkeypatch.setattr(os, "stat", interrupted)
        monkeypatch.setattr(os, "lstat", interrupted)
        with pytest.raises(error):
            ask(f"{tmp_path}/x")
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR2, before)


def test_answers_on_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("missing")
    kinds = {name: mode_of(tmp_path / name) for name in ("file", "link", "nowhere", "missing", "zero\0")}
    assert {name: stat.S_ISREG(mode) for name, mode in kinds.items() if mode} == {"file": True, "link": True}
    assert stat.S_ISLNK(mode_of(tmp_path / "nowhere", follow=False))
    assert real_path(f"{tmp_path}/link") == os.path.realpath(tmp_path / "file")
    assert real_path("/no/such/") == "/no/such"


def test_what_runs_in_a_job_asks_no_function_that_takes_any_error_for_an_answer() -> None:
    """Of the standard library, these do."""
    package = Path(job_exceptions.__file__).parents[1]
    others = (
        "job_exceptions",
        "helper",
        "files/learned",
        "launch",
        "run_record",
        "siblings",
    )  # all but the first in other processes
    own = {f"{package}/publishing/{name}.py" for name in others}
    parts = ("hooks", "hooks/order", "publishing", "publishing/files")
    files = {str(path) for part in parts for path in (package / part).glob("*.py")} - own
    takers = {"exists", "lexists", "isfile", "isdir", "islink", "ismount", "is_dir", "is_file", "is_symlink"}
    takers |= {"glob", "realpath", "resolve"}
    found = [
        f"{os.path.basename(file)}:{node.lineno}: {node.func.attr}"
        for file in sorted(files)
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in takers
    ]
    assert found == []
