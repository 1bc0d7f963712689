"""A wrong command line is answered in the form that was asked for, and help is a command too."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs_tools.cachectl import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "--json", "--bogus"], "--bogus"),
        (["bogus", "--json"], "bogus"),
        (["--bogus", "status", "--json"], "--bogus"),
        (["dataset", "add", "--json", "images"], "URL"),
        (["warmups", "--json", "--watch", "1", "--cancel", "2"], "exclude each other"),  # found by the command itself
        (["warmup", "images", "--fraction", "7", "--json"], "'7' is neither"),
    ],
)
def test_a_usage_error_is_a_document_too(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["error"] == "UsageError"
    assert message in document["message"]
    assert message in done.stderr


def test_without_json_there_is_none() -> None:
    assert CliRunner().invoke(main, ["status", "--bogus"]).stdout == ""
    assert CliRunner().invoke(main, ["status", "more", "--", "--json"]).stdout == ""  # an argument, and no option


def test_help_is_a_command() -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert said("help") == said("--help")
    assert said("help", "dataset", "add") == said("dataset", "add", "--help")
    assert said("help", "status") == said("status", "--help")
    wrong = CliRunner().invoke(main, ["help", "dataset", "fly"])
    assert wrong.exit_code == 2
    assert "there is no command 'fly' in" in wrong.stderr
    assert "did you mean 'dataset'?" in CliRunner().invoke(main, ["help", "datset"]).stderr
    assert said("help", "dataset", "remove") == said("dataset", "rm", "--help").replace(" rm ", " remove ")


def test_help_shows_each_command_in_one_group() -> None:
    said = CliRunner().invoke(main, ["--help"]).stdout
    listed = said.partition("\nSee:\n")[2]
    rows = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2:3].islower()]
    assert sorted(rows) == sorted(main.commands)
    assert [line for line in said.splitlines() if line.endswith(":") and " " not in line[:-1]] == [
        "Options:", "See:", "Data:", "Jobs:", "Cluster:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["dataset", "ls"], ["dataset", "list"]),
        (["dataset", "remove", "d", "-n"], ["dataset", "rm", "d", "-n"]),
        (["job", "ls"], ["job", "list"]),
        (["job", "rm", "j"], ["job", "cancel", "j"]),
    ],
)
def test_one_grammar(words: list[str], same: list[str], tmp_path: Path) -> None:
    """No daemon answers to either, which is no wrong usage."""
    one, other = (CliRunner().invoke(main, ["--socket", str(tmp_path / "s"), *each]) for each in (words, same))
    assert one.exit_code == other.exit_code == 3
    assert one.stderr == other.stderr


@pytest.mark.parametrize(
    ("word", "right"),
    [("prefetch", "warmup"), ("remove", "dataset rm"), ("list", "dataset list"), ("jobs", "job list")],
)
def test_a_word_of_other_tools_is_told_the_right_one(word: str, right: str) -> None:
    done = CliRunner().invoke(main, [word, "images"])
    assert done.exit_code == 2
    assert f"there is no command {word!r}; use `main {right}`" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cachectl ", "dataset"),
        ("cachectl dataset ", "refresh"),
        ("cachectl help dat", "dataset"),
        ("cachectl help dataset re", "refresh"),
        ("cachectl dataset show ", ""),
        ("cachectl ls images tr", ""),
        ("cachectl umount /m", ""),
        ("cachectl job show ", ""),
    ],
)
def test_without_a_daemon_nothing_is_printed_into_the_line_that_is_typed(
    line: str, expected: str, tmp_path: Path
) -> None:
    offered = completed(line, tmp_path / "none")
    assert expected in offered if expected else offered == []


def completed(line: str, socket: Path) -> list[str]:
    """What bash is offered at the end of the *line*."""
    words = line.split(" ")
    environment = {
        "_CACHECTL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
        "CACHEFS_SOCKET": str(socket),
    }  # fmt: skip
    done = CliRunner().invoke(main, [], prog_name="cachectl", env=environment)
    assert done.stderr == ""
    return [offer.partition(",")[2] for offer in done.stdout.split()]
