"""Saves state for the next daemon: periodically, as long as the daemon runs, and file by file."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError

log = logging.getLogger(__name__)

# Seconds between two calls. Changes within them before a daemon is killed are lost: no caller waits for the disk.
SAVE_SECONDS: Final = 0.5
# Seconds until the next call after a failure.
PAUSE_SECONDS: Final = 10.0


async def autosave(save: Callable[[], Awaitable[None]], loss: str) -> None:
    """Run as long as the daemon.

    save: writes the changes since its last call; each of its errors is logged once. loss: what a restart before its
    next success would lose, as the end of a sentence.
    """
    problem = ""
    while True:
        await asyncio.sleep(PAUSE_SECONDS if problem else SAVE_SECONDS)
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


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole. It is not synced: after a crash of the machine it may be empty, so readers check its
    content. Raises OSError; the old file then stays."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)
