"""The pusher's process, as the supervisor keeps it."""

import logging
import subprocess
from typing import Any, cast

import pytest

from cachefs.mount.processes import supervisor
from cachefs.mount.processes.supervisor import PusherProcess


@pytest.mark.parametrize("dies", [True, False])
def test_one_that_does_not_die_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    """A process that hangs at a disk dies when the disk answers."""
    caplog.set_level(logging.WARNING)
    if not dies:
        monkeypatch.setattr(supervisor, "kill_child", lambda _: None)
        monkeypatch.setattr(supervisor, "END_SECONDS", 0.1)
    ours = PusherProcess(*cast(Any, (None, None, None)))
    with subprocess.Popen(["sleep", "600"]) as pusher:
        ours._pid = pusher.pid
        ours.kill_process()
        pusher.kill()
    assert caplog.messages == [
        f"the pusher (process {pusher.pid}) does not die; does a disk of this node hang?" for _ in range(not dies)
    ]
