"""Batches of file I/O: the compiled module and Python do the same."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs_daemon.store import batch_io

PAGE = 4096
COMPILED = (batch_io.read_many, batch_io.punch_many, batch_io.write_many)
IN_PYTHON = (batch_io.read_many_in_python, batch_io.punch_many_in_python, batch_io.write_many_in_python)
NAMES = (b"one", b"two")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    for name in NAMES:
        (tmp_path / name.decode()).touch()
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(params=[COMPILED, IN_PYTHON], ids=["compiled", "python"])
def io(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_it_is_compiled_here() -> None:
    assert not set(COMPILED) & set(IN_PYTHON), "install the package again: pip install -e ."


def test_without_the_compiled_module_python_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cachefs_daemon.store._batch_io", None)
    monkeypatch.delattr("cachefs_daemon.store._batch_io")
    assert batch_io._fastest_functions() == IN_PYTHON


def test_what_is_written_is_read_and_ends_with_the_file(io: Any, directory: int) -> None:
    read, _, write = io
    pieces: list[batch_io.Write] = [(0, (b"head", b"", bytearray(b"body"))), (100, (memoryview(b"xyz"),)), (9, ())]
    assert write(directory, os.O_WRONLY, b"one", 0, pieces) == (3, 0)
    buffer = bytearray(16)
    parts = memoryview(buffer)
    reads = [(b"one", 2, parts[:4]), (b"two", 0, parts[4:5]), (b"none", 0, parts[5:6]), (b"one", 101, parts[6:])]
    assert read(directory, os.O_RDONLY, reads) == [4, 0, -errno.ENOENT, 2]
    assert buffer == b"adbo\0\0yz" + bytes(8)


def test_a_write_that_fails_ends_the_batch(io: Any, directory: int) -> None:
    _, _, write = io
    assert write(directory, os.O_RDONLY, b"one", 0, [(0, (b"x",))]) == (0, errno.EBADF)
    assert write(directory, os.O_WRONLY, b"none", 0, [(0, (b"x",))]) == (0, errno.ENOENT)
    assert write(directory, os.O_WRONLY, b"one", 0, [(0, (b"x",)), (-2, (b"y",)), (5, (b"z",))]) == (1, errno.EINVAL)
    assert os.stat("one", dir_fd=directory).st_size == 1


def test_holes_are_punched_in_several_files(io: Any, directory: int) -> None:
    _, punch, write = io
    for name in NAMES:
        pages: list[batch_io.Write] = [(number * PAGE, (b"x" * PAGE,)) for number in range(4)]
        assert write(directory, os.O_WRONLY, name, PAGE, pages) == (4, 0)
    spans = [(b"one", 0, PAGE), (b"one", 2 * PAGE, 2 * PAGE), (b"none", 0, PAGE), (b"two", 0, 0), (b"two", 0, PAGE)]
    assert punch(directory, os.O_WRONLY, spans) == [0, 0, -errno.ENOENT, -errno.EINVAL, 0]
    taken = [os.stat(name, dir_fd=directory).st_blocks * 512 for name in NAMES]
    assert taken == [PAGE, 3 * PAGE]


@pytest.mark.parametrize(
    "call",
    [
        lambda: COMPILED[0](0, 0, [(b"a", 1)]),  # type: ignore[list-item]
        lambda: COMPILED[0](0, 0, [(b"a", 1, b"not writable")]),  # type: ignore[list-item]
        lambda: COMPILED[0](0, 0, [("a", 1, memoryview(bytearray(1)))]),  # type: ignore[list-item]
        lambda: COMPILED[1](0, 0, [(b"a", "1", 1)]),  # type: ignore[list-item]
        lambda: COMPILED[1](0, 0, 5),  # type: ignore[arg-type]
        lambda: COMPILED[2](0, 0, b"a", 0, [(0, (b"x",) * 5)]),
        lambda: COMPILED[2](0, 0, b"a", 0, [(0, b"x")]),  # type: ignore[list-item]
        lambda: COMPILED[2](0, 0, b"a\0b", 0, [(0, (1,))]),  # type: ignore[list-item]
    ],
)
def test_what_is_no_batch_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        call()


def test_buffers_are_let_go_of(directory: int) -> None:
    buffer = bytearray(b"abc")
    COMPILED[2](directory, os.O_WRONLY, b"one", 0, [(0, (buffer,))])
    COMPILED[0](directory, os.O_RDONLY, [(b"one", 0, memoryview(buffer))])
    with pytest.raises(TypeError):
        COMPILED[0](directory, os.O_RDONLY, [(b"one", 0, memoryview(buffer)), (b"one", 0)])  # type: ignore[list-item]
    buffer.append(1)  # BufferError where somebody holds it


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 20_000), st.lists(st.binary(max_size=3000), max_size=4)), max_size=20))
def test_both_write_alike(directory: int, pieces: list[tuple[int, list[bytes]]]) -> None:
    writes: list[batch_io.Write] = [(start, tuple(parts)) for start, parts in pieces]
    for name, write in zip(NAMES, (COMPILED[2], IN_PYTHON[2]), strict=True):
        os.unlink(name, dir_fd=directory)
        os.close(os.open(name, os.O_CREAT, dir_fd=directory))
        assert write(directory, os.O_WRONLY, name, 0, writes) == (len(writes), 0)
    found = []
    for name, read in zip(NAMES, (COMPILED[0], IN_PYTHON[0]), strict=True):
        buffer = bytearray(40_000)
        (size,) = read(directory, os.O_RDONLY, [(name, 0, memoryview(buffer))])
        found.append(bytes(buffer[:size]))
    assert found[0] == found[1]


def test_other_threads_run_meanwhile(tmp_path: Path) -> None:
    """A pipe with no writer: its reader waits, and with it nobody else."""
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path, os.O_RDONLY)
    results: list[list[int]] = []

    def wait() -> None:
        results.append(COMPILED[0](fd, os.O_RDONLY, [(b"pipe", 0, memoryview(bytearray(1)))]))

    waiting = threading.Thread(target=wait)
    waiting.start()
    with open(tmp_path / "pipe", "wb"):  # opens once both are there
        pass
    waiting.join(60)
    os.close(fd)
    assert results == [[-errno.ESPIPE]]
