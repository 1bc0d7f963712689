"""`cachectl dataset list`: a node without datasets says what to do."""

import json

import pytest
from click.testing import CliRunner

from cachefs.messages import DatasetList
from cachefs_tools.cachectl import main
from cachefs_tools.cachectl.command_session import CommandSession


def test_without_datasets_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommandSession, "call", lambda *_: DatasetList(datasets=[]))
    said = CliRunner().invoke(main, ["dataset", "list"])
    assert said.output == "there is no dataset; `cachectl dataset add NAME URL` adds one\n"
    document = CliRunner().invoke(main, ["dataset", "list", "--json"])
    assert json.loads(document.output)["datasets"] == []
