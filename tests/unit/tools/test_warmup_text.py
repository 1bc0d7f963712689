"""What `cachectl warmup` says, and advises where blocks found no room."""

import time
from datetime import datetime
from unittest.mock import MagicMock

import click
import pytest
from click.testing import CliRunner

from cachefs.messages import TierStatus, WarmupProgress
from cachefs_tools.cachectl import main
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus
from cachefs_tools.cachectl.content import begun_text, holds_lines, parse_time, warmup_text

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


@pytest.mark.parametrize(("text", "seconds"), [("+90s", 90), ("+30m", 1800), ("+2h", 7200), ("+1d", 86_400)])
def test_a_delay_counts_from_now(text: str, seconds: int) -> None:
    assert parse_time(MagicMock(), MagicMock(), text) == pytest.approx(time.time() + seconds, abs=60)


def test_a_time_of_day_is_the_next_one() -> None:
    for text in ("00:00", "07:30", "23:59"):
        when = parse_time(MagicMock(), MagicMock(), text)
        assert 0 < when - time.time() < 25 * 3600  # a day may have 25 hours
        assert datetime.fromtimestamp(when).strftime("%H:%M") == text  # local time is meant


def test_a_date_and_time_is_local_unless_it_has_a_zone() -> None:
    local = datetime(2026, 12, 24, 18, 0).timestamp()  # local time is meant
    assert parse_time(MagicMock(), MagicMock(), "2026-12-24 18:00") == local
    assert parse_time(MagicMock(), MagicMock(), "2026-12-24T18:00+00:00") == 1_798_135_200
    assert parse_time(MagicMock(), MagicMock(), None) == 0


@pytest.mark.parametrize("text", ["soon", "25:00", "12:60", "+2w", "-1h", "99999-01-01", "2026-02-30 10:00"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="nor a delay like"):
        parse_time(MagicMock(), MagicMock(), text)


def test_one_of_the_cluster_says_what_fits_before_it_begins() -> None:
    first = WarmupProgress(1234567, "running", 0, 300, 0, 4 << 20, dataset="ds", cluster=True, holds=1 << 20)
    assert begun_text(first).splitlines() == [
        "ds is being warmed: 300 blocks, 4 MiB, on all nodes as warmup 1234567; see `cachectl warmups`",
        "the tiers of all nodes hold 25.0 % of it, 1 MiB of 4 MiB; the rest is left out",
    ]
    assert not holds_lines(-1, 4 << 20) + holds_lines(4 << 20, 4 << 20)
