"""The `cachefs` command."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs import cli


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    link = tmp_path / "sbin" / "mount.cachefs"
    link.parent.mkdir()
    monkeypatch.setattr(cli, "MOUNT_HELPER_LINK", link)
    return link


def test_mount_helper_is_linked_and_an_old_link_replaced(link: Path) -> None:
    link.symlink_to("/nonexistent/old")
    for _ in range(2):
        assert CliRunner().invoke(cli.main, ["install-mount-helper"]).exit_code == 0
        assert os.access(link, os.X_OK)
        assert link.resolve().name == "mount.cachefs"


def test_mount_helper_replaces_a_file_only_when_forced(link: Path) -> None:
    link.write_text("somebody else's")
    refused = CliRunner().invoke(cli.main, ["install-mount-helper"])
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert link.read_text() == "somebody else's"
    assert CliRunner().invoke(cli.main, ["install-mount-helper", "--force"]).exit_code == 0
    assert link.is_symlink()


def test_the_link_of_another_installation_stays_unless_forced(link: Path, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    link.symlink_to(tmp_path / "other")
    refused = CliRunner().invoke(cli.main, ["install-mount-helper"])
    assert refused.exit_code == 1
    assert f"another installation's ({tmp_path}/other); replace it with --force" in refused.output
    assert link.resolve() == tmp_path / "other"
    assert CliRunner().invoke(cli.main, ["install-mount-helper", "--force"]).exit_code == 0
    assert link.resolve().name == "mount.cachefs"


def test_run_says_that_an_option_is_unknown() -> None:
    done = CliRunner().invoke(cli.main, ["run", "--nosuch", "--", "true"])
    assert done.exit_code == 2
    assert "no such option: --nosuch" in done.output


def test_mount_helper_without_permission_says_so(link: Path) -> None:
    link.parent.rmdir()
    failed = CliRunner().invoke(cli.main, ["install-mount-helper"])
    assert failed.exit_code == 1
    assert failed.output.count("\n") == 1
    assert "cannot link" in failed.output
