"""Which mounts are behind a refresh: those that stay, and were not told which snapshot to show."""

import pytest

from cachefs.messages import MountView
from cachefs_daemon.mounts.lagging import with_lag
from cachefs_tools.cachectl.status import mount_snapshot

OLD, NEW = "0" * 32, "f" * 32


@pytest.mark.parametrize(
    ("spec", "snapshot", "newest", "shown"),
    [
        ("d", OLD, NEW, "00000000 behind"),
        ("d", NEW, NEW, "ffffffff newest"),
        ("d", OLD, "", "00000000 newest"),  # nothing newer can be had
        ("d", "", NEW, "unknown"),  # an older mount says nothing
        ("d@000", OLD, NEW, "00000000 chosen"),
        ("d@latest", OLD, NEW, "00000000 follows"),
        ("d,e", "", NEW, "newest"),
        ("all", "", NEW, "newest"),
    ],
)
def test_what_a_mount_shows(spec: str, snapshot: str, newest: str, shown: str) -> None:
    view = MountView(
        id="1", mountpoint="/m", spec=spec, pid=1, alive=True, seconds_since_report=0, counters={}, snapshot=snapshot
    )
    lagging = with_lag(view, {"d": newest}.__getitem__)
    assert lagging.behind == ("behind" in shown)
    assert mount_snapshot(lagging) == shown
