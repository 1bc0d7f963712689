"""Records when the job's loop asks a loader for a batch, and when it gets the batch.

`for batch in loader` looks up `__next__` of torch's iterator for each batch, and torch counts the batch in
`_num_yielded` just before returning it. Both are descriptors: the first returns the method itself, the second keeps the
number where torch would, in the iterator. So no frame of ours is on the stack while the loader works.
"""

import functools
import sys
from typing import Any

from cachefs.publishing import clock
from cachefs.publishing.channel import warn_once
from cachefs.publishing.job_exceptions import is_from_job


class NextDescriptor:
    """Descriptor in place of `_BaseDataLoaderIter.__next__`."""

    def __init__(self, method: Any) -> None:
        functools.update_wrapper(self, method)  # type: ignore[arg-type]
        self._method = method

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self._method
        progress = iterator._cachefs
        if progress is not None:
            progress.record_request(clock.monotonic_ns())
        return functools.partial(self._method, iterator)


class NumYieldedDescriptor:
    """Descriptor in place of `_BaseDataLoaderIter._num_yielded`: the batches given in the current epoch."""

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self
        try:
            return vars(iterator)["_num_yielded"]
        except KeyError:
            raise AttributeError(f"{type(iterator).__name__!r} object has no attribute '_num_yielded'") from None

    def __set__(self, iterator: Any, number: Any) -> None:
        vars(iterator)["_num_yielded"] = number
        progress = iterator._cachefs
        if progress is not None:
            try:
                progress.record_batch(iterator, clock.monotonic_ns(), sys._getframe(1))
            except Exception as error:  # no failure here may end the job
                if is_from_job(error):
                    raise
                warn_once(f"cannot measure how long the loop waits for a DataLoader ({error!r})")

    def __delete__(self, iterator: Any) -> None:
        del vars(iterator)["_num_yielded"]
