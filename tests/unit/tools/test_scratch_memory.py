"""Directories for memory tiers of scratch nodes: what killed processes have left goes, what others use stays."""

import pytest

from cachefs_bench.lab import scratch_node
from cachefs_bench.lab.scratch_node import memory_directory

PREFIX = "cachefs-tests-scratch-"


def test_what_a_killed_process_has_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_directory(PREFIX) as used:
        left = used.parent.with_name(f"{used.parent.name}-left")
        left.mkdir()
        (left / "00000000.seg").touch()
        with memory_directory(PREFIX):
            assert left.exists()  # its owner may be about to lock it
        monkeypatch.setattr(scratch_node, "LOCK_SECONDS", -1.0)
        with memory_directory(PREFIX) as other:
            assert not left.exists()
            assert used.exists()
            assert other.exists()
    assert not used.parent.exists()
    assert not other.parent.exists()
