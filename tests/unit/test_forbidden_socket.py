"""Who may not use a socket is told so, and nobody else."""

import os
from pathlib import Path

import pytest

from cachefs.socket_path import is_forbidden


def test_a_socket_that_goes_while_it_is_looked_at_is_not_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that starts removes the socket of one that was killed."""
    path, access = tmp_path / "s", os.access
    for binds_again in (False, True):
        path.touch()

        def gone(looked_at: Path, mode: int, *, effective_ids: bool, binds_again: bool = binds_again) -> bool:
            path.rename(tmp_path / "old")  # it is in use, so that the next one has another inode number
            found = access(looked_at, mode, effective_ids=effective_ids)
            if binds_again:
                path.touch()
            return found

        monkeypatch.setattr(os, "access", gone)
        assert not is_forbidden(path)
        monkeypatch.undo()


def test_a_socket_that_one_may_not_write_to_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    assert not is_forbidden(path)
    path.touch()
    assert not is_forbidden(path)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as for anybody but root
    assert is_forbidden(path)
