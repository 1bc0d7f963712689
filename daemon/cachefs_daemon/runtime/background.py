"""Work that goes on in the background of the daemon."""

from collections.abc import Callable, Coroutine
from typing import Any

# Runs as long as the daemon.
BackgroundWork = Callable[[], Coroutine[Any, Any, None]]
