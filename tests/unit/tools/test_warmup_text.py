"""What `cachectl warmup` advises where blocks found no room."""

import pytest
from click.testing import CliRunner

from cachefs.messages import TierStatus, WarmupProgress
from cachefs_tools.cachectl import main
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus
from cachefs_tools.cachectl.content import warmup_text

LAST = WarmupProgress(1, "done", 152, 300, 1 << 20, 2 << 20, skipped=148, dataset="ds")


def tier(limit: int) -> TierStatus:
    return TierStatus("ssd", "/ssd", 14 << 20, limit, 0, 0, 0, 0, 0, 0, "slru")


def test_a_larger_budget_is_advised_where_the_budget_is_the_limit() -> None:
    text = warmup_text(LAST, [tier(14 << 20)])
    assert "148 blocks found no room: enlarge a tier's budget, or warm less (--fraction)" in text


def test_room_on_the_disk_is_advised_where_the_disk_is_the_limit() -> None:
    text = warmup_text(LAST, [tier(618 << 10)])
    assert (
        "found no room: only 618 KiB of the ssd tier's budget of 14 MiB can be used: make room on what /ssd is on, or "
        "warm less (--fraction)"
    ) in text
    assert "enlarge" not in text


def test_the_watch_of_a_warmup_whose_list_has_missing_paths_ends_as_the_warmup_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = WarmupProgress(1, "done", 3, 3, 1 << 20, 1 << 20, dataset="ds", missing=2, first_missing="gone/1")
    monkeypatch.setattr(CommandSession, "stream", lambda *_: iter([last]))
    done = CliRunner().invoke(main, ["warmups", "--watch", "1"])
    assert "(incomplete)" in done.stdout
    assert "2 of the paths are not in the dataset, the first is gone/1" in done.stdout
    assert done.exit_code == ExitStatus.INCOMPLETE
