"""Runs work to its end even when its caller goes away.

A call is cancelled when its caller goes away: a client that was killed, or whose time is over. Work that changes
several things one after the other must not stop between two of them.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A reference to each task: the event loop itself keeps none.
_running: Final[set[asyncio.Task[Any]]] = set()


async def shielded(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of *work*, which goes on in a task of its own when the caller is cancelled. Only the end of the
    event loop ends it earlier."""
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: "asyncio.Task[Any]") -> None:
    """Log the failure of work whose caller is gone."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed after its caller was cancelled: %s", task.get_coro(), error)
