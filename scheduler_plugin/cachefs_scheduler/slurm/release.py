"""Releases jobs that are held for a slot of a copy while nobody is there who would: `cachefs-slurm-hint --release`.

Only where `wait = "hold"`: a begin time passes by itself. A timer of systemd runs it (slurm/plugin), so that a service
or a program that is gone for long keeps no job waiting for ever.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm.hint_file import age_and_lasting
from cachefs_scheduler.slurm.job_tag import released
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

_log = logging.getLogger(__name__)

# Seconds between two looks at the hint file.
LOOK_SECONDS: Final = 2.0


async def is_silent(hint_file: Path, seconds: float) -> bool:
    """Has the service said nothing for so long, as the hint file tells? Where there is none, that is waited for; False
    as soon as there is one that Lua would not ignore."""
    begun = time.monotonic()
    while True:
        known = await asyncio.to_thread(age_and_lasting, hint_file)
        if known is not None and known[0] <= known[1]:
            return False
        if time.monotonic() - begun >= seconds or (known is not None and known[0] >= seconds):
            return True
        await asyncio.sleep(min(LOOK_SECONDS, seconds))


async def release_all(slurm: SlurmCommands) -> int:
    """Release all jobs that are held by us, arrays as a whole. Returns how many. Raises CachefsError where some are
    still held."""
    count, problems = 0, []
    for job in await slurm.jobs():
        if not (job.held and job.tag.held):
            continue
        try:
            await slurm.release(job.id, released(job.admin_comment))
        except CachefsError as error:  # such as for a job that has been cancelled meanwhile
            problems.append(str(error))
            continue
        _log.info("job %s is held no longer", job.id)
        count += 1
    if problems:
        raise CachefsError(f"{count} jobs were released, and some are perhaps still held: {problems[0]}")
    return count
