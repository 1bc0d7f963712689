"""Commands of Slurm that hang."""

import asyncio
from pathlib import Path

import pytest

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm import slurm_commands
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands
from tests.waiting import until


def test_a_wrapper_that_hangs_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its child has the pipe: newer Pythons wait for that too.
    child = tmp_path / "child"
    for name in ("scontrol", "squeue", "sinfo"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {child}.new\nmv {child}.new {child}\nwait\n")
        program.chmod(0o755)
    monkeypatch.setattr(slurm_commands, "_COMMAND_SECONDS", 0.5)
    commands = SlurmCommands(tmp_path, 10.0)
    while not child.exists():  # on a slow machine, the command may be ended before it has a child
        with pytest.raises(CachefsError, match="did not end within"):
            asyncio.run(commands.list_jobs())
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX", "its child ends")
