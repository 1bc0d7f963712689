"""Whom cachectl asks: the daemon's socket and the service's, and how they may be written."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs_tools.cachectl import main
from cachefs_tools.cachectl.sched import SchedulerClient


@pytest.mark.parametrize("words", [["status", "--socket"], ["--socket"]])
def test_the_socket_may_stand_before_the_command_too(tmp_path: Path, words: list[str]) -> None:
    path = str(tmp_path / "none.sock")
    done = CliRunner().invoke(main, [*words, path, *(["status"] if words == ["--socket"] else [])])
    assert done.exit_code == 3
    assert path in done.output


def test_the_one_behind_the_command_counts(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.sock"), str(tmp_path / "second.sock")
    done = CliRunner().invoke(main, ["--socket", first, "dataset", "list", "--socket", second])
    assert second in done.output
    assert first not in done.output


def test_the_socket_of_the_service_may_be_written_as_for_slurm(tmp_path: Path) -> None:
    assert SchedulerClient(f"unix:{tmp_path}/s.sock").address == f"{tmp_path}/s.sock"


def test_a_dataset_is_scaled_to_a_number_of_copies(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["scale", "--dataset", "d", "--scheduler", str(tmp_path / "s.sock")])
    assert done.exit_code == 1
    assert "--copies N" in done.output
