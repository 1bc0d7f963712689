"""A call through the control file whose reader does not live to answer it."""

import os
from pathlib import Path

import pytest

from cachefs.errors import DaemonUnavailable
from cachefs.publishing.transport import _MAX_TRIES, CONTROL_FILE, _ControlCall


def test_a_call_that_ends_each_process_that_reads_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / CONTROL_FILE
    control.parent.mkdir()
    os.mkfifo(control)
    reader = os.open(control, os.O_RDONLY | os.O_NONBLOCK)
    answer = _ControlCall._wait_for_response

    def die(exchange: _ControlCall, fd: int, number: int) -> None:
        nonlocal reader
        os.close(reader)
        try:
            answer(exchange, fd, number)
        finally:
            reader = os.open(control, os.O_RDONLY | os.O_NONBLOCK)  # the next process
            tries.append(number)

    tries: list[int] = []
    monkeypatch.setattr(_ControlCall, "_wait_for_response", die)
    answers, writer = os.pipe()
    with pytest.raises(DaemonUnavailable):
        _ControlCall(tmp_path, answers, timeout=600).run([b"one line\n"], 1)
    for fd in (answers, writer, reader):
        os.close(fd)
    assert len(tries) == _MAX_TRIES
