"""A wrong command line is answered in the form that was asked for, and help is a command too."""

import json

import pytest
from cachefs_tools.cachectl import main
from click.testing import CliRunner


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
