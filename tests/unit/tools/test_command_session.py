"""A question of cachectl: what an answer, and an interruption, make of the exit status."""

import builtins
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
import pytest

from cachefs_tools.cachectl.command_session import CommandSession, with_session


@click.command()
@with_session
def question(session: CommandSession) -> None:
    session.confirm("this frees all", False)
    click.echo("done")


def answered(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], str]) -> int:
    """Runs the command as a program whose terminal gives *answer*. Returns its exit status."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(click.termui, "visible_prompt_func", answer)
    monkeypatch.setattr(builtins, "input", answer)
    with pytest.raises(SystemExit) as ended:
        question.main([])
    status: Any = ended.value.code
    return int(status)


def test_an_interruption_at_a_question_is_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    assert answered(monkeypatch, interrupt) == 130
    assert "Aborted" not in capsys.readouterr().err


def test_no_and_the_end_of_input_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: str) -> str:
        raise EOFError

    assert answered(monkeypatch, lambda _: "n") == 1
    assert answered(monkeypatch, end) == 1
    assert answered(monkeypatch, lambda _: "y") == 0
