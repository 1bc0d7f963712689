"""What the tutorial lets people type is whole. That it works is a test of tests/packages."""

import re
import subprocess
from pathlib import Path

import click
import pytest

from cachefs_tools.cachectl import main

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^cat > (\w+\.py) <<'END'\n(.*?)^END$", PAGE, re.MULTILINE | re.DOTALL)
CALLS = re.findall(r"\bcachectl ([a-z][a-z-]*(?: (?:add|show|list|rm))?)", "".join(COMMANDS))


def test_a_shell_can_read_the_commands() -> None:
    checked = subprocess.run(["bash", "-n"], input="".join(COMMANDS), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(("name", "text"), PROGRAMS)
def test_python_can_read_the_programs(name: str, text: str) -> None:
    compile(text, name, "exec")


@pytest.mark.parametrize("call", sorted(set(CALLS)))
def test_cachectl_has_the_command(call: str) -> None:
    command: click.Command | None = main
    for word in call.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
        assert command is not None, f"there is no cachectl {call}"


def test_there_is_something_to_read() -> None:
    assert (len(COMMANDS) > 8, [name for name, _ in PROGRAMS]) == (True, ["make_dataset.py", "train.py", "train_s3.py"])
