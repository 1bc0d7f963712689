"""Releases jobs held for a slot while the service or cachefs-slurm-hint is down: `cachefs-slurm-hint --release`.

Needed only with `wait = "hold"`, since a begin time passes by itself. A systemd timer runs it (slurm/plugin), so that a
long outage does not hold jobs forever.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm.hint_file import age_and_lifetime
from cachefs_scheduler.slurm.job_tag import released_comment
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

_log = logging.getLogger(__name__)

# Seconds between checks of the hint file.
CHECK_SECONDS: Final = 2.0


async def is_silent(hint_file: Path, seconds: float) -> bool:
    """Return whether the service has been silent for *seconds*, according to the hint file. Waits that long if there is
    no file; returns False as soon as there is a file that Lua would accept."""
    begun = time.monotonic()
    while True:
        known = await asyncio.to_thread(age_and_lifetime, hint_file)
        if known is not None and known[0] <= known[1]:
            return False
        if time.monotonic() - begun >= seconds or (known is not None and known[0] >= seconds):
            return True
        await asyncio.sleep(min(CHECK_SECONDS, seconds))


async def release_all(slurm: SlurmCommands) -> int:
    """Release all jobs held by cachefs, arrays as a whole, and return their number. Raises CachefsError if some remain
    held."""
    count, problems = 0, []
    for job in await slurm.list_jobs():
        if not (job.held and job.tag.held):
            continue
        try:
            await slurm.release_job(job.id, released_comment(job.admin_comment))
        except CachefsError as error:  # for instance, the job has been cancelled meanwhile
            problems.append(str(error))
            continue
        _log.info("job %s is held no longer", job.id)
        count += 1
    if problems:
        raise CachefsError(f"{count} jobs were released, and some are perhaps still held: {problems[0]}")
    return count
