"""How a mount without root sees that it is used, while it ends."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.mount import device, ending
from cachefs.mount.ending import Ending
from cachefs.mount_table import MountPoint


@pytest.mark.parametrize(("shielded", "forgotten"), [(None, [7]), (57, [])])
def test_names_are_not_forgotten_below_a_shield(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shielded: int | None, forgotten: list[int]
) -> None:
    """overlayfs would answer ESTALE to a program that reads the mount."""
    told: list[int] = []
    monkeypatch.setattr(device, "forget_names", told.append)
    monkeypatch.setattr(ending, "mount_points", lambda: [MountPoint(tmp_path, "0:58", "cachefs:one", shielded)])
    monkeypatch.setattr(ending, "_listen_to_signals", lambda: -1)
    mount = SimpleNamespace(directory=tmp_path)
    made = Ending(mount, 7)  # type: ignore[arg-type]
    os.write(made._writer, b"opens cannot be watched\n")
    made._look_for_uses((1,))
    assert told == forgotten
