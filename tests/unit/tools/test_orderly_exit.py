"""A command that fails or is interrupted ends with one line and the right status."""

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from cachefs.errors import CachefsError
from cachefs_bench.orderly_exit import orderly_exit


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of this process, restored afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("error", [CachefsError("no room"), OSError("no room")])
def test_a_failure_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, orderly_exit("program"):
        raise error
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", "program: no room\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cleaning_up_is_not_disturbed(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    @orderly_exit("program")
    def program() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        program()
    assert (ended.value.code, cleaned) == (130, [True])
    assert capsys.readouterr().err == "program: interrupted; nothing is left mounted or running\n"


def test_an_interruption_that_python_forgets_is_raised_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    @orderly_exit("program")
    def program() -> None:
        Interrupted()
        threading.Event().wait(60)

    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "program: interrupted; nothing is left mounted or running\n"


def test_nothing_is_said_where_nothing_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with orderly_exit("program"):
        pass
    assert capsys.readouterr() == ("", "")
