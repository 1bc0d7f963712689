"""Options of cachefs-bench that cannot be meant are wrong usage, before anything is started."""

import pytest
from click.testing import CliRunner

from cachefs.errors import ConfigError
from cachefs_bench.block_budget import sample_warning
from cachefs_bench.cli import main


@pytest.mark.parametrize(
    "arguments",
    [
        *(["origin", option, "0"] for option in ("--turns", "--parallel", "--size", "--gets", "--throttle")),
        ["origin", "--gets", "-5"],
        ["origin", "--throttle", "-3"],
        ["origin", "--slow", "often"],
        ["block", "--seconds", "0"],
        ["block", "--seconds", "-1"],
        *(["cluster", "--job-ranks", shape, "--scenario", "m1"] for shape in ("0", "x", "2@", "2@0", "2@nan", "9999")),
        ["cluster", "--job-ranks", "2", "--scenario", "m3"],
        *(
            [command, "--directory", "/nope"]
            for command in sorted(main.commands)
            if command not in ("extender", "growth", "hints", "peers", "plan", "scheduling")
        ),
    ],
)
def test_impossible_options_are_wrong_usage(arguments: list[str]) -> None:
    done = CliRunner().invoke(main.commands[arguments[0]], arguments[1:])
    assert done.exit_code == 2, done.output
    assert arguments[1] in done.output
    assert "/nope" not in arguments or "'/nope' does not exist" in done.output


@pytest.mark.parametrize("command", ["miss", "listing"])
def test_a_running_server_needs_both_credentials(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    done = CliRunner().invoke(main.commands[command], ["--endpoint", "http://127.0.0.1:9"])
    assert isinstance(done.exception, ConfigError)
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(done.exception)


def test_figures_of_a_short_run_come_with_a_warning() -> None:
    assert "only 134 blocks in 5 s" in sample_warning("memory", 134, 5.0)
    assert "only 5,000 blocks in 1 s" in sample_warning("memory", 5000, 1.0)
    assert sample_warning("memory", 5000, 5.0) == ""
