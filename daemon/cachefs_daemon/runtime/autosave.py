"""Saving again and again, for as long as the daemon runs, what a next daemon is to know."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from cachefs.errors import CachefsError

log = logging.getLogger(__name__)

# What changed so shortly before a daemon was killed is forgotten. Nobody waits for the disk.
SECONDS: Final = 0.5
PAUSE_SECONDS: Final = 10.0


async def autosave(save: Callable[[], Awaitable[None]], loss: str) -> None:
    """save: writes what is new since its last call; its errors are said once. loss: of a restart before it succeeds."""
    problem = ""
    while True:
        await asyncio.sleep(PAUSE_SECONDS if problem else SECONDS)
        before, problem = problem, ""
        try:
            await save()
        except (CachefsError, OSError) as error:
            problem = str(error)
            if problem != before:
                log.warning("%s; trying again; after a restart before that %s", error, loss)
        except Exception:
            problem = "internal error"
            log.exception("after a restart %s", loss)
