"""For the imports of a command, which take half a second: an interruption then ends it without a traceback."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_loading() -> Iterator[None]:
    """SIGINT ends the process in the block, as it does in programs that know nothing of signals.

    Where somebody has chosen another way to handle it, that one stays.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
