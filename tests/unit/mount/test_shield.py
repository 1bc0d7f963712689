"""Which mounts may have a shield, and what is said of those that may not."""

import logging
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from cachefs.errors import CachefsError
from cachefs.mount import child_process, shield
from cachefs.mount.device import FuseConnection
from cachefs.mount.options import ShieldChoice
from cachefs.mount.shield import put_up_shield, shield_obstacle
from cachefs.mount_spec import MountSpec

ONE = MountSpec.parse("one")


class NoConnection:
    number = 57
    has_abort = True


def test_root_s_mount_of_one_dataset_may_have_one() -> None:
    assert shield_obstacle(ONE, root=True, allow_other=True, can_abort=True) is None
    assert shield_obstacle(MountSpec.parse("one@3f9c"), root=True, allow_other=True, can_abort=True) is None


@pytest.mark.parametrize(
    ("spec", "root", "allow_other", "can_abort", "says"),
    [
        ("one", False, True, True, "takes root"),
        ("all", True, True, True, "several datasets"),
        ("one,two", True, True, True, "several datasets"),
        ("one", True, False, True, "noallow_other"),
        ("one", True, True, False, "control files"),
    ],
)
def test_other_mounts_may_not(spec: str, root: bool, allow_other: bool, can_abort: bool, says: str) -> None:
    found = shield_obstacle(MountSpec.parse(spec), root=root, allow_other=allow_other, can_abort=can_abort)
    assert found is not None
    assert says in found


def test_where_it_is_not_possible_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shield, "_put_up_in_child", lambda *_: "Invalid argument")
    connection = cast(FuseConnection, NoConnection())
    put_up_shield(ShieldChoice.AUTO, ONE, Path("/data"), connection, (), shared=True)
    assert [record.getMessage() for record in caplog.records] == [
        "no shield over /data: Invalid argument. So each open() of Python before 3.14 asks the mount; "
        "not so in jobs of `cachefs run`"
    ]
    with pytest.raises(CachefsError, match="no shield over /data: Invalid argument; mount with -o shield=auto"):
        put_up_shield(ShieldChoice.ON, ONE, Path("/data"), connection, (), shared=True)
    caplog.clear()
    put_up_shield(ShieldChoice.OFF, ONE, Path("/data"), connection, (), shared=True)
    assert not caplog.records


def test_a_process_that_hangs_is_killed_and_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def fork_watched(name: str, directory: Path, work: Callable[[], None]) -> tuple[int, int]:
        children.append(subprocess.Popen(["sleep", "1000"]))
        return children[0].pid, os.pidfd_open(children[0].pid)

    monkeypatch.setattr(shield, "fork_watched", fork_watched)
    monkeypatch.setattr(shield, "SHIELD_SECONDS", 0.01)
    assert "not there within" in str(shield._put_up_in_child(ONE, Path("/nowhere"), 57, ()))
    deadline = time.monotonic() + 20
    while Path(f"/proc/{children[0].pid}").exists():
        assert time.monotonic() < deadline
        child_process.reap_killed()
    children[0].wait(20)
