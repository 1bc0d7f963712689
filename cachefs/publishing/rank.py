"""Finds the rank of this process in a distributed job, as set by its launcher."""

import contextlib
import os
from typing import Final

from cachefs.publishing.page import MAX_NUMBER

# Environment variables in which launchers of distributed jobs name a process's (rank, world size).
_RANK_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def find_rank() -> tuple[int | None, int]:
    """Return (rank, world size) as set by the launcher of a distributed job; (None, 1) without a launcher."""
    for rank, world_size in _RANK_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            number, of = int(os.environ[rank]), int(os.environ[world_size])
            if 0 <= number < of < MAX_NUMBER:
                return number, of
    return None, 1
