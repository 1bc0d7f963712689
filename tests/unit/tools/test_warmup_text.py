"""What `cachectl warmup` advises where blocks found no room."""

from cachefs_tools.cachectl.content import warmup_text

from cachefs.messages import TierStatus, WarmupProgress

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
