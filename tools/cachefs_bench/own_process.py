"""Runs a measurement in a process of its own, so that memory left by others does not count."""

import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_own_process(measure: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs) -> Result:
    """Return the result of *measure*, a function of a module. An interruption ends the process silently.

    Ctrl-C in a terminal sends SIGINT to all processes of the command; the child would print a traceback.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child process inherits the mask
            try:
                running = pool.submit(measure, *args, **options)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)  # raises an interruption that came meanwhile
            return running.result()
        except KeyboardInterrupt:
            for child in active_children():
                child.kill()
            raise
